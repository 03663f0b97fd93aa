"""The components of Adaptive Retention that need only torch: settings, budget, gates, scorer, cost."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_repro.retention import PROFILES, RetentionConfig, RetentionScorer, keep_top, running_summary
from acp_repro.retention.budget import active_gates, compact, floor_share, take, token_budgets, top_indices
from acp_repro.retention.cost import encoder_cost
from acp_repro.retention.gates import counted_share, hard_concrete, open_logits
from acp_repro.retention.scorer import running_summary_loop


@pytest.mark.parametrize("length", [1, 63, 129, 1000])
@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_summary_matches_the_recurrence(length, decay):
    x = torch.randn(2, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    exact = running_summary_loop(x, decay)
    torch.testing.assert_close(running_summary(x, decay), exact, rtol=1e-12, atol=1e-12)
    # In float32, at most the loop's distance from float64 plus a few roundings.
    worst = (running_summary_loop(x.float(), decay) - exact).abs().max()
    assert (running_summary(x.float(), decay) - exact).abs().max() <= 2 * worst + 1e-6


def test_scorer_applies_equation_3_to_kept_tokens_only():
    torch.manual_seed(0)
    scorer = RetentionScorer(8, 5, 0.9, initial_logit=0.3).double()
    hidden = torch.randn(1, 7, 8, dtype=torch.float64)
    kept = torch.tensor([[True, False, True, True, False, True, True]])
    scores = scorer(hidden, kept)
    m = torch.zeros(8, dtype=torch.float64)
    for t in torch.nonzero(kept[0])[:, 0].tolist():
        h = hidden[0, t]
        expected = scorer.v(torch.tanh(scorer.w(h) + scorer.u(m)))
        torch.testing.assert_close(scores[0, t], expected[0])
        m = 0.9 * m + 0.1 * h
    torch.testing.assert_close(scorer(hidden[:, kept[0]]), scores[:, kept[0]])
    scorer, hidden = scorer.float(), hidden.float()
    with torch.autocast("cpu", torch.bfloat16):  # for W and U alone
        found = scorer(hidden)
        parts = torch.cat([scorer.w(hidden), scorer.u(hidden)], -1).double()
    scorer, hidden = scorer.double(), hidden.double()
    local, summed = parts.chunk(2, -1)
    before = torch.nn.functional.pad(running_summary_loop(summed, 0.9)[:, :-1], (0, 0, 1, 0))
    exact = scorer.v(torch.tanh(local + before))[..., 0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    called = []
    for part in (scorer.w, scorer.u, scorer.v):  # adapters and hooks disable the fused path and are called
        part.register_forward_hook(lambda module, *_: called.append(module))
    torch.testing.assert_close(scorer(hidden, kept)[kept], scores[kept])
    assert called == [scorer.w, scorer.u, scorer.v]


def test_hard_concrete_open_rate_matches_its_formula():
    s, beta, stretch = torch.tensor([-2.0, 0.0, 1.5]), 0.66, (-0.1, 1.1)
    u = torch.rand(200_000, 3, generator=torch.Generator().manual_seed(0))
    z = hard_concrete(s, u, beta, stretch)
    assert z.min() == 0 and z.max() == 1
    share = (z > 0).float().mean(0)
    assert (share - torch.sigmoid(open_logits(s, beta, stretch))).abs().max() < 4 * (0.25 / 200_000) ** 0.5
    # The paper counts sigmoid(s), which differs; both are settings.
    assert (share - torch.sigmoid(s)).min() > 0.1


def test_penalty_follows_its_setting():
    s = torch.tensor([0.4])
    assert counted_share(RetentionConfig(0.5), s) == torch.sigmoid(s)
    expected = torch.sigmoid(s - 0.66 * torch.log(torch.tensor(0.1 / 1.1)))
    torch.testing.assert_close(counted_share(RetentionConfig(0.5, penalty="expected_l0"), s), expected)
    without_relaxation = RetentionConfig(0.5, penalty="expected_l0", relaxation="sigmoid")
    assert counted_share(without_relaxation, s) == torch.sigmoid(s)  # z = p is never 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": float("nan")}, "budget: must be a number in (0, 1]"),
        ({"method": "adaptiv"}, "did you mean adaptive?"),
        ({"gates": (3, 1)}, "gates: must be after_blocks, input, output or increasing positions"),
        ({"gates": None}, "gates: must be"),
        ({"stretch": (0.1, 1.1)}, "stretch: must be"),
        ({"stretch": (-0.1, float("inf"))}, "stretch: must be"),
        ({"gate_keys": 1}, "gate_keys: must be true or false, got 1"),
        ({"schedule": "profile"}, "profile: goes with schedule: profile"),
        ({"schedule": "profile", "profile": "table7"}, "profile: must be one of table5_30"),
        ({"schedule": "profile", "profile": (0.3, 0.4)}, "or non-increasing shares in (0, 1]"),
        ({"initial_multiplier": -1.0}, "initial_multiplier: must be at least 0"),
    ],
)
def test_invalid_settings_are_rejected_at_construction(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        RetentionConfig(**{"budget": 0.5} | settings)


@pytest.mark.parametrize(
    ("budget", "settings", "places", "active"),
    [
        (0.5, {"gates": "after_blocks"}, (1, 2, 3), (1,)),  # a gate that cannot drop tokens is omitted
        (0.5, {"gates": "after_blocks", "schedule": "geometric"}, (1, 2, 3), (1, 2, 3)),
        (0.5, {"schedule": "profile", "profile": (1.0, 0.4, 0.4)}, (1, 2, 3), (2,)),
        (0.5, {"gates": "input"}, (0,), (0,)),
        (0.5, {"gates": "output"}, (3,), (3,)),
        (1.0, {}, (), ()),
        (0.5, {"method": "dense"}, (), ()),
        (1.0, {"schedule": "profile", "profile": (0.5,), "gates": "input"}, (0,), (0,)),
    ],
)
def test_gate_positions(budget, settings, places, active):
    config = RetentionConfig(budget, **settings)
    assert config.places(3) == places and active_gates(config, places) == active


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gates": (1, 4)}, "is after the last of 3 blocks"),
        ({"schedule": "profile", "profile": "table5_30"}, "profile: has 6 shares for 3 gates"),
    ],
)
def test_gate_positions_must_fit_the_encoder(settings, words):
    with pytest.raises(ValueError, match=words):
        RetentionConfig(0.5, **settings).places(3)


def test_budgets_of_each_schedule():
    lengths = torch.tensor([100, 10, 3, 1, 0])

    def of(**settings):
        return [b.tolist() for b in token_budgets(RetentionConfig(0.3, **settings), lengths, 3)]

    assert of() == [[30, 3, 1, 1, 0]] * 3
    assert of(schedule="geometric") == [[30, 3, 1, 1, 0], [9, 1, 1, 1, 0], [2, 1, 1, 1, 0]]
    assert of(schedule="profile", profile=(0.5, 0.25, 0.25)) == [[50, 5, 1, 1, 0], *[[25, 2, 1, 1, 0]] * 2]
    # 0.29 of 100 is 29, though 0.29 * 100 is a little less in floating point.
    assert floor_share(torch.tensor([100]), 0.29) == 29 == floor_share(100, 0.29)
    assert [floor_share(n, 0.3) for n in (0, 1, 3, 10)] == [0, 1, 1, 3]
    assert all(len(PROFILES[f"table5_{b}"]) == 6 and len(PROFILES[f"table6_{b}"]) == 12 for b in (30, 50))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_top_m_keeps_the_highest_scores_within_the_budget(data):
    length = data.draw(st.integers(1, 12))
    valid = torch.tensor([data.draw(st.lists(st.booleans(), min_size=length, max_size=length))])
    # Few values, so that there are ties, and infinities.
    values = st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 1e38, torch.inf])
    scores = torch.tensor([data.draw(st.lists(values, min_size=length, max_size=length))])
    protected = torch.zeros_like(valid)
    if valid.any():
        protected[0, valid[0].nonzero()[0]] = True
    budget = floor_share(valid.sum(1), data.draw(st.floats(0.01, 1)))
    kept = keep_top(scores, valid, protected, budget)
    assert kept.sum() == budget.item()  # exactly the budget
    assert not (kept & ~valid).any()  # padding is never chosen
    assert (kept | ~protected).all()
    rank = {i: (not protected[0, i], -scores[0, i].item(), i) for i in range(length) if valid[0, i]}
    assert set(kept[0].nonzero()[:, 0].tolist()) == set(sorted(rank, key=rank.get)[: budget.item()])
    places = compact(kept, int(kept.sum()))
    assert places.valid.all() and places.indices[0].tolist() == kept[0].nonzero()[:, 0].tolist()  # in order
    assert (take(scores, places.indices) == scores[:, kept[0]]).all()
    direct = top_indices(scores, valid, protected, budget, length)
    assert torch.equal(direct.indices[direct.valid], places.indices[0]) and (direct.indices < length).all()
    assert torch.equal(direct.kept(valid), kept) and torch.equal(places.kept(valid), kept)
    if budget.item():
        same = top_indices(scores, valid, protected, None, budget.item())
        assert same.valid is None and torch.equal(same.indices, places.indices)
    if valid.all():
        assert torch.equal(top_indices(scores, None, protected, budget, length).indices, direct.indices)


def test_cost_follows_the_remaining_tokens():
    dense = encoder_cost([512] * 6, 768, 3072)
    # 2 (4 d^2 + 8 d^2) linear FLOPs and 4 T d of attention for each token and block.
    assert dense.linear_flop == 6 * 512 * 24 * 768**2
    assert dense.attention_flop == 6 * 4 * 512**2 * 768
    half = encoder_cost([512, *[256] * 5], 768, 3072, scored=[512])
    assert half.linear_flop == dense.linear_flop * (1 + 5 * 0.5) / 6
    assert half.attention_flop == dense.attention_flop * (1 + 5 * 0.25) / 6
    # W and U, the summary's product with at most 128 positions, and v, each for 64 rows.
    assert half.scorer_flop == 2 * 512 * 64 * (2 * 768 + 128 + 1)
    assert encoder_cost([100], 768, 3072, scored=[100]).scorer_flop == 2 * 100 * 64 * (2 * 768 + 100 + 1)
    assert encoder_cost([512], 768, 3072, windows=[64]).attention_flop == 4 * 512 * 64 * 768


def _expected(loss: torch.Tensor, masks: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """E[L] under independent gates; ``loss`` of each mask, ``p`` (rows, tokens)."""
    return torch.where(masks.bool(), p[:, None], 1 - p[:, None]).prod(-1) @ loss


def test_minimiser_slack_is_at_most_the_gap_over_lambda():
    """Appendix C, Proposition 1. E[L] is linear in each p, so the Lagrangian is minimal at a mask."""
    generator, budget = torch.Generator().manual_seed(0), 2
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 5)
    p = torch.rand(2000, 5, dtype=torch.float64, generator=generator)
    p = torch.cat([p * (budget / p.sum(1, keepdim=True)).clamp(max=1), masks[masks.sum(1) <= budget]])
    over = 0
    for _ in range(50):
        loss = torch.rand(32, dtype=torch.float64, generator=generator) - 0.3 * masks.sum(1)
        for multiplier in (0.05, 0.2, 0.5):
            best = (loss + multiplier * (masks.sum(1) - budget)).argmin()
            slack = masks[best].sum() - budget
            assert multiplier * slack <= _expected(loss, masks, p).min() - loss[best] + 1e-12
            over += int(slack > 0)
    assert over > 50  # the bound is tested with violated budgets


def test_duality_gap_does_not_bound_the_slack_of_a_minimiser_over_the_budget():
    """Appendix G, Lemma 3: the loss is the share of tokens that are dropped, of four with a budget of one."""
    masks, multiplier = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4), 0.01
    loss, slack = 1 - masks.mean(1), masks.sum(1) - 1
    best = (loss + multiplier * slack).argmin()
    least = _expected(loss, masks, masks[slack <= 0]).min()  # linear in p, so minimal at a mask
    gap = loss[best] + multiplier * slack[best] - least
    assert gap < 0 < multiplier * slack[best] <= least - loss[best]
