"""Training on a batch: both losses, ratios and gradients."""

import pytest
import torch

from acp_repro.lap import autoencoder, draw_noise
from acp_repro.lap.config import LOG_REMOVED
from tests.lap.tiny import TEXTS, model


@pytest.mark.parametrize("training_mask", ["soft", "straight_through", "hard_concrete"])
def test_padding_does_not_contribute(training_mask):
    """A batch of texts of several lengths equals the token-weighted mean over single texts."""
    built = model(training_mask=training_mask)
    with torch.no_grad():
        together = built(built.token_ids(TEXTS))
        alone = [built(built.token_ids([text])) for text in TEXTS]
    lengths = together.lengths[0]
    assert (
        lengths.tolist() == [float(found.lengths[0]) for found in alone] and len(set(lengths.tolist())) == 3
    )
    nats = torch.stack([found.cross_entropy for found in alone])
    torch.testing.assert_close(together.cross_entropy, (nats * lengths).sum() / lengths.sum())
    torch.testing.assert_close(together.compression, torch.stack([a.compression for a in alone]).mean())
    for name in ("lengths", "kept"):
        torch.testing.assert_close(getattr(together, name), torch.cat([getattr(a, name) for a in alone], 1))
    torch.testing.assert_close(together.correct, torch.cat([found.correct for found in alone]))
    trained = built.train()(built.token_ids(TEXTS))
    if training_mask == "straight_through":  # counts remaining tokens
        assert torch.equal(trained.lengths, trained.kept.float())


def test_gates_have_independent_noise(built):
    ids = built.token_ids([TEXTS[0]])
    noise = torch.zeros(built.num_gates, *ids.shape)
    noise[0, 0, 2], noise[1, 0, 4] = 0.3, -0.2

    def inputs(gates):  # of the sigmoid
        return gates - torch.log(-torch.expm1(gates))

    with torch.no_grad():
        plain, noisy = (
            built.encode_tokens(ids, "none", drawn).log_gate[:, :, :-1] for drawn in (None, noise)
        )
    moved = (inputs(noisy) - inputs(plain)) * built.pruning.tau
    torch.testing.assert_close(moved, noise[:, :, :-1], rtol=1e-3, atol=1e-4)


def test_accuracy_is_a_share_of_non_padding_tokens(built, monkeypatch):
    ids = built.token_ids(TEXTS)
    best = ids.clone()
    best[1, 0] += 1
    logits = torch.nn.functional.one_hot(best, built.t5.config.vocab_size).float()
    monkeypatch.setattr(autoencoder, "decode_teacher", lambda *_: logits)
    length = int((ids[1] != built.t5.config.pad_token_id).sum())
    assert built(ids).correct.tolist() == pytest.approx([1, (length - 1) / length, 1])


@pytest.mark.parametrize("training_mask", ["soft", "straight_through", "hard_concrete"])
def test_eos_is_never_gated_and_tokens_are_removed_once(training_mask):
    built = model(training_mask=training_mask)
    ids = built.token_ids(TEXTS)
    real, eos = ids != built.t5.config.pad_token_id, ids == built.t5.config.eos_token_id
    found = built.encode_tokens(ids, "straight_through" if training_mask == "straight_through" else "soft")
    assert not found.log_gate[:, eos].any() and found.kept[:, eos].all()
    if training_mask == "hard_concrete":
        assert (found.open_probability[:, eos] == 1).all() and (found.open_probability[:, real] < 1).any()
    if training_mask == "straight_through":
        assert set(found.memory_mask[real].tolist()) == {0.0, LOG_REMOVED}


def test_token_credit_is_normalised_over_the_batch(monkeypatch):
    built, limits = model(training_mask="straight_through", credit_nats=3.0), []
    encode = autoencoder.encode_masked
    monkeypatch.setattr(
        autoencoder, "encode_masked", lambda *a, **k: limits.append(k["credit_limit"]) or encode(*a, **k)
    )
    ids = built.token_ids(TEXTS)
    built(ids)
    assert limits[0].item() == pytest.approx(3 / (ids != built.t5.config.pad_token_id).sum().item())


@pytest.mark.parametrize(
    ("mask", "gate"),
    [
        ("soft", "published"),
        ("soft", "article"),
        ("straight_through", "published"),
        ("straight_through", "article"),
        ("hard_concrete", "published"),
    ],
)
def test_both_losses_reach_the_gates(mask, gate):
    noise = "none" if gate == "article" else "logistic"
    built = model(training_mask=mask, gate=gate, noise=noise).train()
    ids = built.token_ids(TEXTS)
    drawn = draw_noise((built.num_gates, *ids.shape), built.pruning, torch.Generator().manual_seed(0))
    row = built.t5.encoder.block[0].layer[-1].DenseReluDense.wo.weight
    for name in ("cross_entropy", "compression"):
        built.zero_grad()
        getattr(built(ids, drawn), name).backward()
        assert torch.isfinite(row.grad).all()
        # After block 0 element 0 is cleared, so this row acts through the gate alone.
        assert row.grad[0].abs().max() > 1e-7, name
