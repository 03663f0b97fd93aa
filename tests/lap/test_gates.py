"""Gates, masks and the compression loss against explicit formulas of the article."""

import dataclasses
import math

import pytest
import torch

from acp_repro.lap import (
    PruningConfig,
    PruningError,
    compression_loss,
    draw_noise,
    expected_lengths,
    log_gates,
    open_probability,
    pair_mask,
    soft_lengths,
    straight_through,
)

SIGNAL = torch.tensor([-2.0, -0.3, 0.0, 1.5])


def test_both_interpretations_of_the_gate():
    article = PruningConfig(gate="article", noise="none", beta=0.7, tau=0.4)
    torch.testing.assert_close(log_gates(SIGNAL, article).exp(), torch.sigmoid(SIGNAL / 0.4 + 0.7))
    published = PruningConfig(beta=0.7, tau=0.4)
    torch.testing.assert_close(log_gates(SIGNAL, published).exp(), torch.sigmoid((SIGNAL + 0.7) / 0.4))
    noise = torch.tensor([0.1, 2.0, -1.0, 0.0])
    torch.testing.assert_close(
        log_gates(SIGNAL, published, noise).exp(), torch.sigmoid((SIGNAL + noise + 0.7) / 0.4)
    )


def test_hard_concrete_gates_are_clipped_and_penalised_by_open_probability():
    config = PruningConfig(training_mask="hard_concrete", noise="logistic", beta=0.3, tau=0.7)
    signal = torch.tensor([-3.0, -1.0, 0.0, 0.5, 4.0])
    wanted = (torch.sigmoid(signal + 0.3) * 1.2 - 0.1).clamp(0, 1)
    found = log_gates(signal, config)
    assert (found[wanted == 0] == -math.inf).all() and (wanted == 0).sum() == 1
    torch.testing.assert_close(found[wanted > 0].exp(), wanted[wanted > 0])
    many = signal[:, None].expand(-1, 100_000)
    noise = draw_noise(many.shape, config, torch.Generator().manual_seed(0))
    opened = (log_gates(many, config, noise) > config.log_threshold).float().mean(1)
    torch.testing.assert_close(opened, open_probability(signal, config), atol=0.01, rtol=0)
    edge = log_gates(torch.linspace(-1e-5, 1e-5, 4001) - 0.3 - math.log(11), config)  # where a gate closes
    assert torch.isinf(edge).any() and edge[~torch.isinf(edge)].min() == pytest.approx(math.log(1e-6))
    lengths = expected_lengths(
        torch.tensor([[[0.5, 1.0, 0.9]], [[0.4, 1.0, 0.9]]]), torch.tensor([[True, True, False]])
    )
    torch.testing.assert_close(lengths[:, 0], torch.tensor([2.0, 1.5, 1.2]))


def test_noise_follows_its_generator_and_has_the_expected_mean():
    def draw(kind, seed=3):
        return draw_noise((200_000,), PruningConfig(noise=kind), torch.Generator().manual_seed(seed))

    assert torch.equal(draw("gumbel"), draw("gumbel")) and not torch.equal(draw("gumbel"), draw("gumbel", 4))
    assert abs(draw("gumbel").mean() - 0.5772) < 0.02
    assert abs(draw("logistic").mean()) < 0.02 and abs(draw("logistic").std() - math.pi / 3**0.5) < 0.02
    assert draw_noise((5,), PruningConfig(noise="none")) is None


def test_pair_mask_matches_the_sum_over_tokens_of_the_article():
    g = torch.tensor([[-0.5, 0.0, -3.0]])
    wanted = torch.zeros(3, 3)
    for i in range(3):
        for j in range(3):
            for k in range(3):
                wanted[j, k] += g[0, i] * ((j == i) != (k == i))
    torch.testing.assert_close(pair_mask(g)[0, 0], wanted)


def test_lengths_and_loss_match_a_hand_computation():
    log_gate = torch.tensor([[[-1.0, 0.0, -2.0, -9.0]], [[-0.5, 0.0, -4.0, -9.0]]])
    real = torch.tensor([[True, True, True, False]])
    lengths = soft_lengths(log_gate, real, d_kv=16)
    first = math.exp(-1 / 4) + 1 + math.exp(-2 / 4)
    second = math.exp(-1.5 / 4) + 1 + math.exp(-6 / 4)
    torch.testing.assert_close(lengths[:, 0], torch.tensor([3.0, first, second]))
    wanted = ((first / 3) ** 2 + (second / first) ** 2) / 2
    assert float(compression_loss(lengths)) == pytest.approx(wanted, rel=1e-6)
    assert float(compression_loss(soft_lengths(torch.zeros(2, 1, 4), real, 16))) == 1.0


def test_counting_kept_tokens_has_the_gradient_of_the_sum_of_gates():
    log_gate = torch.tensor([[[-1.0, 0.0, -2.0]]], requires_grad=True)
    real, kept = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[[True, True, False]]])
    counted = soft_lengths(log_gate, real, 4, kept)
    assert counted[:, 0].tolist() == [3.0, 2.0]
    (hard,) = torch.autograd.grad(counted[-1].sum(), log_gate)
    (soft,) = torch.autograd.grad(log_gate[0, 0].exp().sum(), log_gate)
    torch.testing.assert_close(hard, soft)


def test_straight_through_gives_the_derivative_with_respect_to_alpha():
    """Against attention that multiplies by alpha, at alpha = 1 for kept and 0 for dropped tokens."""
    torch.manual_seed(0)
    scores, values = torch.randn(5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    log_gate = torch.tensor([[-0.1, -0.2, -3.0, -2.0, -0.4]], dtype=torch.float64, requires_grad=True)
    kept = log_gate.detach() > -1
    mask = straight_through(log_gate, kept, torch.tensor(math.inf, dtype=torch.float64))
    out = (torch.softmax(scores + mask[0], -1) @ values).square().sum()
    (found,) = torch.autograd.grad(out, log_gate)

    alpha = kept[0].double().requires_grad_()
    weights = alpha * scores.exp()
    oracle = (weights / weights.sum() @ values).square().sum()
    torch.testing.assert_close(out, oracle)
    (slope,) = torch.autograd.grad(oracle, alpha)
    torch.testing.assert_close(found[0], slope * log_gate.detach()[0].exp())


def test_token_credit_is_bounded():
    log_gate = torch.tensor([[-2.0, -0.1]], requires_grad=True)
    mask = straight_through(log_gate, log_gate.detach() > -1, torch.tensor(0.5))
    (mask * 100).sum().backward()
    torch.testing.assert_close(log_gate.grad, 0.5 * log_gate.detach().exp())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tau": 0.0}, r"tau: must be a finite number above 0, because it divides \(.*straight_through\)"),
        ({"tau": math.nan}, "tau:"),
        ({"gate": "hard"}, "gate: must be published or article, got 'hard'"),
        ({"gate": "article"}, "noise: gate: article supports no noise"),
        ({"threshold": 0.0}, "threshold: must be a number below 0, as log gates are"),
        ({"gate_every": 0}, "gate_every: must be a whole number of at least 1, got 0"),
        ({"training_mask": "hard_concrete"}, "training_mask: hard_concrete needs gate: published"),
        ({"signal_limit": 6.0}, "signal_limit: needs"),
        ({"beta": True}, "beta: must be a finite number, got True"),
    ],
)
def test_invalid_settings_are_rejected(settings, words):
    with pytest.raises(PruningError, match=words):
        PruningConfig(**settings)


def test_bounded_signal_has_nonzero_gradient():
    config = PruningConfig(training_mask="hard_concrete", noise="logistic", beta=1.0, signal_limit=6.0)
    signal = torch.tensor([-1e3, -1.0, 0.0, 1.0, 1e3], requires_grad=True)
    probability = open_probability(signal, config)
    probability.sum().backward()
    free = open_probability(torch.tensor([-1e3, 0.0, 1e3]), dataclasses.replace(config, signal_limit=None))
    halved = open_probability(torch.tensor([-3.0]), dataclasses.replace(config, signal_limit=None))
    assert open_probability(torch.tensor([-6.0]), config) == halved  # x / (1 + |x| / 6)
    assert probability[2] == free[1] and 0 < probability[0] < 0.1 and 0.999 < probability[4] < 1
    assert (probability.diff() > 0).all() and (signal.grad > 1e-10).all()
    assert log_gates(signal, config)[0] == -math.inf and log_gates(signal, config)[4] > -0.01
