"""Each method's gate against hand computations: scores, ranking, samples, losses, random selection."""

import pytest
import torch

from acp_repro.retention import RetentionConfig
from acp_repro.retention.gates import GATES, GateInputs

HIDDEN = 8


def make(method, **settings):
    return GATES[method](RetentionConfig(0.3, method=method, **settings), HIDDEN)


def inputs(valid, received=None, ids=None):
    valid = torch.as_tensor(valid)
    positions = torch.arange(valid.shape[1]).expand(valid.shape)
    return GateInputs(torch.zeros(*valid.shape, HIDDEN), valid, received, ids, positions)


def test_top_method_scores_tokens_by_attention_rank():
    gate = make("top", ranks=2, initial_logit=1.5)
    assert gate.rank_logits.tolist() == [1.5, 1.5] and gate.layer_logit == 2.0
    gate.rank_logits.data, gate.layer_logit.data = torch.tensor([2.0, -1.0]), torch.tensor(0.5)
    received = torch.tensor([[0.9, 0.1, 0.5, 0.7, 5.0, 6.0]])  # ranks 0, 3, 2, 1; the last two are padding
    seen = inputs([[True] * 4 + [False] * 2], received)
    # p = 1 - sigmoid(0.5) (1 - sigmoid(2 or -1)) is 0.925801 in the better half and 0.544946 in the other.
    expected = torch.tensor([2.52391, 0.180273, 0.180273, 2.52391])
    scores = gate(seen)
    torch.testing.assert_close(scores[0, :4], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(gate.rank_values(scores, seen), received)
    gate.layer_logit.data.fill_(-100.0)  # the gate is disabled: every token is kept
    torch.testing.assert_close(torch.sigmoid(gate(seen)), torch.ones(1, 6))


def test_infor_coef_samples_and_its_bottleneck_is_a_divergence(monkeypatch):
    gate = make("infor_coef", initial_logit=0.5, bottleneck_weight=2.0)
    gate.sampler[-1].weight.data.zero_()
    scores = gate(inputs([[True, True]]))
    assert scores.tolist() == [[0.5, 0.5]]
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 0.8))
    # sigmoid((0.5 + log 4) / 0.66)
    torch.testing.assert_close(gate.sample(scores), torch.full((1, 2), 0.945732), rtol=1e-5, atol=1e-6)
    # p is 0.5, 0.3 and, for a token that does not count, 0.9999; rho is 0.3.
    # 0.5 log(0.5 / 0.3) + 0.5 log(0.5 / 0.7) = 0.0871767, and 0 for the second; the mean of both, times 2.
    scores = torch.tensor([[0.0, -0.8472979, 9.0]])
    loss = gate.extra_loss(scores, torch.tensor([[True, True, False]]))
    assert loss.item() == pytest.approx(0.0871767, rel=1e-5)


def test_random_selection_depends_on_the_example_and_seed_only():
    def score(seed, ids, length=12, training=False):
        valid = (torch.arange(12) < length)[None].expand(len(ids), -1)
        return make("random", seed=seed).train(training)(inputs(valid, ids=ids))

    ids = torch.arange(24).view(2, 12)
    scores = score(0, ids)
    assert torch.equal(scores, score(0, ids)) and torch.equal(scores[1:], score(0, ids[1:]))
    best = [set(row.tolist()) for row in scores.topk(4).indices]
    assert best[0] != best[1] and best[0] != set(score(1, ids).topk(4).indices[0].tolist())
    shorter, padded = score(0, ids[:1], 8), ids[:1].clone()
    padded[:, 8:] = 59  # padding values have no effect
    assert torch.equal(score(0, padded, 8)[:, :8], shorter[:, :8])
    assert not torch.equal(score(0, ids, training=True), score(0, ids, training=True))
    assert (scores >= 0).all() and (scores < 1).all() and scores.unique().numel() == 24
