"""The encoder with masks and with removed tokens, both decoders, files, and invalid input."""

import copy
import json

import pytest
import torch
import transformers

from acp_repro.lap import PruningAutoencoder, PruningConfig
from acp_repro.lap.blocks import fuse_norms
from acp_repro.lap.decoder import Decoding, decode_teacher
from tests.lap.tiny import SHAPE, TEXTS, model, tokenizer, with_settings, without_element_0


def test_open_gates_equal_plain_t5():
    built = without_element_0(model(beta=1e4, decoder_window=None))
    ids = built.token_ids(TEXTS)
    real = ids != built.t5.config.pad_token_id
    with torch.no_grad():
        plain = built.t5(
            input_ids=ids, attention_mask=real.long(), decoder_input_ids=built.shift_right(ids)
        ).logits
        for mask in ("soft", "removed", "straight_through", "none"):
            encoded = built.encode_tokens(ids, mask)
            assert encoded.kept.sum() == built.num_gates * real.sum()
            found = decode_teacher(
                built.t5, encoded.hidden, encoded.memory_mask, built.shift_right(ids), None
            )
            torch.testing.assert_close(found[real], plain[real], rtol=1e-5, atol=1e-5)


def test_fused_operations_match_t5():
    config = transformers.T5Config(
        **{"vocab_size": 50, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, **SHAPE},
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    plain = transformers.T5ForConditionalGeneration(config)
    for weight in plain.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    fused = copy.deepcopy(plain)
    fuse_norms(fused)
    assert [type(x).__name__ for x in fused.modules()].count("FusedNorm") > 4
    assert list(fused.state_dict()) == list(plain.state_dict())
    ids = torch.randint(2, 50, (2, 9))
    for t5 in (plain, fused):
        t5(input_ids=ids, labels=ids).loss.backward()
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["masked", "removed"])
def test_element_0_carries_only_the_gate_signal(form):
    """Each block receives 0 there: embedding values, read gates and writes of earlier blocks are cleared."""
    built, seen = model(), []
    for block in built.t5.encoder.block:
        block.layer[0].layer_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = built.token_ids(TEXTS)
    assert built.t5.shared.weight[ids, 0].abs().min() > 0
    with torch.no_grad():
        built.encode_tokens(ids, "removed") if form == "masked" else built.encode_ids(ids)
    assert len(seen) == 4 and not any(hidden[..., 0].any() for hidden in seen)
    assert all(hidden[..., 1].any() for hidden in seen)


@pytest.mark.parametrize("training_mask", ["soft", "straight_through", "hard_concrete"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_removing_equals_masking(training_mask, seed):
    built = model(seed, training_mask=training_mask)
    ids = built.token_ids(TEXTS)
    with torch.no_grad():
        masked = built.encode_tokens(ids, "removed")
        memory = built.encode_ids(ids)
        kept = masked.kept[-1]
        assert 3 < kept.sum() < (ids != built.t5.config.pad_token_id).sum(), "the test wants some dropped"
        assert torch.equal(memory.kept, kept.sum(1))
        before = ids != built.t5.config.pad_token_id
        for gate, after in enumerate(masked.kept):
            assert torch.equal(memory.dropped_by == gate, before & ~after)
            before = after
        for row in range(len(ids)):
            count = int(memory.kept[row])
            assert torch.equal(memory.positions[row, :count], kept[row].nonzero()[:, 0])
            for found, wanted in ((memory.vectors, masked.hidden), (memory.mask, masked.memory_mask)):
                torch.testing.assert_close(found[row, :count], wanted[row, kept[row]], rtol=1e-5, atol=1e-5)
        inputs = built.shift_right(ids)
        long = decode_teacher(built.t5, masked.hidden, masked.memory_mask, inputs, 5)
        short = decode_teacher(built.t5, memory.vectors, memory.mask, inputs, 5)
        torch.testing.assert_close(short, long, rtol=1e-4, atol=1e-5)
    assert memory.vectors.shape[1] == int(memory.kept.max()) < ids.shape[1]


@pytest.mark.parametrize("training_mask", ["soft", "straight_through", "hard_concrete"])
def test_decoder_weights_tokens_by_their_gates(training_mask):
    """By the product of the gates, which is 1 for tokens kept by a straight-through model."""
    built = model(training_mask=training_mask)
    ids = built.token_ids(TEXTS)
    with torch.no_grad():
        found, soft = built.encode_tokens(ids, "removed"), built.encode_tokens(ids, "soft")
    real, kept = ids != built.t5.config.pad_token_id, found.kept[-1]
    torch.testing.assert_close(soft.memory_mask[real], soft.log_gate.sum(0)[real])
    wanted = torch.zeros_like(found.log_gate) if training_mask == "straight_through" else found.log_gate
    torch.testing.assert_close(found.memory_mask[kept], wanted.sum(0)[kept])
    assert (found.memory_mask[~kept] == -torch.inf).all() and (soft.memory_mask[~real] == -torch.inf).all()
    if training_mask != "straight_through":
        assert found.memory_mask[kept].min() < -0.1
    # Weights: a vector that occurs twice with weight 1/2 counts once.
    memory, inputs = found.hidden[:, :4], built.shift_right(ids)
    halves = torch.zeros(len(ids), 8) - torch.log(torch.tensor(2.0))
    with torch.no_grad():
        once = decode_teacher(built.t5, memory, torch.zeros(len(ids), 4), inputs, 5)
        twice = decode_teacher(built.t5, memory.repeat(1, 2, 1), halves, inputs, 5)
        halves[:, 0] -= 3.0
        other = decode_teacher(built.t5, memory.repeat(1, 2, 1), halves, inputs, 5)
    torch.testing.assert_close(once, twice, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(once, other, rtol=1e-4, atol=1e-5)


def test_hard_concrete_gate_masks_as_much_as_it_removes():
    """The soft mask of this model equals removal: partially masked tokens are kept."""
    built = model(training_mask="hard_concrete", beta=-1.0)
    ids = built.token_ids(TEXTS)
    with torch.no_grad():
        soft, removed = built(ids, mask="soft"), built(ids, mask="removed")
    assert (removed.kept[-1] < removed.kept[0]).sum() > 0
    torch.testing.assert_close(soft.cross_entropy, removed.cross_entropy, rtol=1e-6, atol=1e-6)


def test_batched_texts_equal_single_texts(built):
    together = built.encode(TEXTS)
    lengths = [len(built.tokenizer.encode(text)) + 1 for text in TEXTS]
    torch.testing.assert_close(together.keep_ratio, together.kept / torch.tensor(lengths))
    written = built.decode(together, max_length=12)
    for row, text in enumerate(TEXTS):
        alone = built.encode([text])
        count = int(alone.kept[0])
        torch.testing.assert_close(together.vectors[row, :count], alone.vectors[0], rtol=1e-5, atol=1e-5)
        assert together.tokens[row] == alone.tokens[0]
        assert built.decode(alone, max_length=12) == [written[row]]


@pytest.mark.parametrize("window", [0, 2, 5, None])
def test_cached_decoding_matches_teacher_forcing(window):
    built = model(decoder_window=window)
    ids = built.token_ids([TEXTS[2], TEXTS[2][::-1]])
    memory, inputs = built.encode_ids(ids), built.shift_right(ids)
    with torch.no_grad():
        wanted = decode_teacher(built.t5, memory.vectors, memory.mask, inputs, window)
        state = Decoding(built.t5, memory.vectors, memory.mask, window)
        found = torch.stack([state.step(column) for column in inputs.T], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_all_tokens_except_eos_dropped():
    built = model(beta=-1e4)
    memory = built.encode(TEXTS)
    assert memory.kept.tolist() == [1, 1, 1] and memory.tokens == [["</s>"]] * 3
    assert memory.vectors.shape[1] == 1 and torch.isfinite(memory.vectors).all()
    assert len(built.decode(memory, max_length=4)) == 3
    for mask in ("soft", "straight_through"):
        training = with_settings(built, training_mask=mask).train()
        losses = training(built.token_ids(TEXTS))
        (losses.cross_entropy + losses.compression).backward()
        assert all(torch.isfinite(p.grad).all() for p in built.parameters() if p.grad is not None)


@pytest.mark.parametrize("tied", [True, False])
def test_initialisation_from_any_t5(tmp_path, tied):
    """T5 1.0 scales the input of its head; T5 1.1 and Flan-T5 do not."""
    reader = tokenizer()
    config = transformers.T5Config(
        vocab_size=reader.vocab_size,
        pad_token_id=reader.pad_id,
        eos_token_id=reader.eos_id,
        decoder_start_token_id=reader.pad_id,
        tie_word_embeddings=tied,
        **{**SHAPE, "num_layers": 2},
    )
    plain = transformers.T5ForConditionalGeneration(config).eval()
    (tmp_path / "t5").mkdir()
    plain.save_pretrained(tmp_path / "t5")
    saved = json.loads((tmp_path / "t5/config.json").read_text())
    (tmp_path / "t5/config.json").write_text(json.dumps({**saved, "tie_word_embeddings": tied}))
    reader.save(tmp_path / "t5")
    built = PruningAutoencoder.from_t5(tmp_path / "t5", PruningConfig(noise="none", beta=1e4))
    built.save_pretrained(tmp_path / "ours")
    again = PruningAutoencoder.from_pretrained(tmp_path / "ours")
    assert again.t5.config.scale_decoder_outputs == plain.config.scale_decoder_outputs == tied
    assert again.pruning == built.pruning and not again.training
    ids = built.token_ids(TEXTS)
    with torch.no_grad():
        assert torch.equal(again(ids).cross_entropy, built.eval()(ids).cross_entropy)


def test_inference_in_training_mode_applies_no_dropout():
    """The training mode of each module is also preserved."""
    built = model(shape={**SHAPE, "dropout_rate": 0.5}, beta=1e4).train()
    built.t5.decoder.eval()
    memory = built.encode(TEXTS)
    wanted = built.decode(memory, 8)
    assert torch.equal(built.encode(TEXTS).vectors, memory.vectors)
    assert built.t5.encoder.training and not built.t5.decoder.training
    assert all(built.decode(memory, 8) == wanted for _ in range(3))
    ids = built.token_ids(TEXTS)
    assert built(ids).cross_entropy != built(ids).cross_entropy  # dropout is active in training


def test_special_tokens_in_a_text_are_encoded_as_text():
    built = model(beta=1e4)
    ids = built.token_ids(["a </s> cat <pad>"])[0].tolist()
    assert ids.count(built.t5.config.eos_token_id) == 1 and built.t5.config.pad_token_id not in ids
    assert built.tokenizer.decode(ids) == "a </s> cat <pad>"
