"""The criteria of the report, each on records small enough to check by hand."""

import math

import pandas as pd
import pytest

from analysis import criteria, statistics
from analysis.report_items import ITEMS

RUN = {
    "architecture": "pro",
    "size": "a",
    "context_length_tokens": 512,
    "seed": 0,
    "log_pruning_tolerance": -10.0,
}


def table(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame([RUN | row for row in rows])


def blocks(*pruned: int, lengths=(512, 1024), size: str = "a") -> pd.DataFrame:
    """One head a run, ``pruned`` of 100 blocks."""
    return table(
        *(
            {"size": size, "context_length_tokens": length, "pruned_blocks": p, "causal_blocks": 100}
            for p, length in zip(pruned, lengths, strict=False)
        )
    )


def test_pruned_at_longest_looks_at_the_longest_context_of_every_size():
    verdict = criteria.pruned_at_longest(blocks(10, 70))
    assert verdict.met and verdict.ours == "a: 70 % at 1k"
    both = pd.concat([blocks(10, 70), blocks(60, 81, size="b")])
    verdict = criteria.pruned_at_longest(both)
    assert verdict.met is False and "b: 81 % at 1k (above the range)" in verdict.ours
    assert "(below the range)" in criteria.pruned_at_longest(blocks(70, 10)).ours


def test_growth_needs_two_lengths_and_every_size():
    assert criteria.savings_grow(blocks(50, 60)).met
    assert criteria.savings_grow(blocks(60, 60)).met is False
    assert criteria.savings_grow(pd.concat([blocks(50, 60), blocks(60, 50, size="b")])).met is False
    assert criteria.savings_grow(blocks(50)).met is None
    # The order of the records does not matter.
    assert criteria.savings_grow(blocks(60, 50, lengths=(1024, 512))).met


def both_methods(column: str, acp: float, exact: float) -> pd.DataFrame:
    return table({"method": "acp", column: acp}, {"method": "exact", column: exact})


def test_time_and_throughput():
    times = both_methods("forward_ms", 1.0, 2.0).assign(backward_ms=0.0)
    assert criteria.time_saved(times).met and "50 % at 512" in criteria.time_saved(times).ours
    times = both_methods("forward_ms", 1.1, 2.0).assign(backward_ms=0.0)
    assert criteria.time_saved(times).met is False
    speed = both_methods("throughput_tokens_per_s", 100.0, 100.0)
    assert criteria.throughput_not_lower(speed).met
    assert criteria.throughput_not_lower(speed).ours == "a: +0 % at 512"
    assert not criteria.throughput_not_lower(both_methods("throughput_tokens_per_s", 99.0, 100.0)).met
    assert criteria.gains_grow(speed).met is None
    search = both_methods("forward_ms", 50.0, 90.0).assign(backward_ms=50.0)
    assert criteria.search_is_cheap(search.assign(boundary_search_ms=6.0)).met
    assert criteria.search_is_cheap(search.assign(boundary_search_ms=6.1)).met is False


def losses(*pairs: tuple[float, float]) -> pd.DataFrame:
    """A seed for each (with ACP, exact)."""
    return table(
        *(
            {"log_pruning_tolerance": tolerance, "seed": seed, "loss_nats": loss}
            for seed, pair in enumerate(pairs)
            for tolerance, loss in zip((-10.0, None), pair, strict=True)
        )
    )


def test_losses_match_within_the_noise_of_seeds_or_the_papers_own():
    assert criteria.losses_match(losses((3.019, 3.0))).met
    assert criteria.losses_match(losses((3.021, 3.0))).met is False
    # Seeds differ by 0.2, the means of twins by 0.05.
    noisy = criteria.losses_match(losses((3.1, 3.0), (3.1, 3.1), (3.1, 3.2), (3.3, 3.1)))
    assert noisy.met and "two seeds differ by up to 0.200" in noisy.ours
    quiet = criteria.losses_match(losses((3.02, 3.0), (3.021, 3.001)))
    assert quiet.met is False
    assert criteria.losses_match(losses((3.0, 3.0))[:1]).met is None


def heads(*ratios: float, layers=None, length: int = 640) -> pd.DataFrame:
    """Ten blocks a side: at most 36 of 55 are pruned, a row keeping its own and the one before."""
    layers = layers or [0] * len(ratios)
    return table(
        *(
            {
                "context_length_tokens": length,
                "layer": layer,
                "head": i,
                "pruned_ratio": r,
                "block_q_tokens": 64,
                "block_k_tokens": 64,
            }
            for i, (r, layer) in enumerate(zip(ratios, layers, strict=True))
        )
    )


def test_kinds_of_heads_are_relative_to_what_the_grid_allows():
    most = 36 / 55
    kinds = statistics.head_kinds(heads(most, 0.951 * most, 0.949 * most, 0.051 * most, 0.049 * most))
    assert kinds.tolist() == ["local", "local", "between", "between", "global"]
    assert criteria.heads_bimodal(heads(most, most, 0.0, 0.3)).met
    assert criteria.heads_bimodal(heads(most, most, 0.3)).met is False  # no global head
    assert criteria.heads_bimodal(heads(most, 0.0, 0.3, 0.3)).met is False  # as many between
    assert criteria.most_heads_local(heads(most, most, 0.3)).met
    assert criteria.most_heads_local(heads(most, 0.3)).ours == "1 of 2 heads"
    assert criteria.most_heads_local(heads(most, 0.3)).met is False
    # Two blocks a side: nothing can be pruned.
    assert criteria.heads_bimodal(heads(0.0, length=128)).met is None


def test_first_layers():
    most = 36 / 55
    assert criteria.first_layers_local(heads(most, most, 0.1, layers=[0, 1, 2])).met
    verdict = criteria.first_layers_local(heads(most, 0.1, most, layers=[0, 1, 2]))
    assert verdict.met is False and verdict.ours == "1 of 1 in layer 0, 0 of 1 in layer 1"
    assert criteria.first_layers_local(heads(most, most, layers=[0, 1])).met is None


def test_large_weights_left_of_the_boundary_are_counted():
    head = {"layer": 0, "head": 0}
    decay = table(
        {**head, "position": 0, "first_kept_key_position": 0},
        {**head, "position": 1, "first_kept_key_position": 1},
    )
    weights = table(
        {**head, "query_position": 0, "key_position": 0}, {**head, "query_position": 1, "key_position": 1}
    )
    assert criteria.large_weights_kept(decay, weights).met
    verdict = criteria.large_weights_kept(decay, weights.assign(key_position=0))
    assert verdict.met is False and verdict.ours == "1 of 2 such weights are pruned"


def sweep(ratios: dict[float, float], **columns) -> pd.DataFrame:
    rows = ({"swept_log_pruning_tolerance": e, "block_pruned_ratio": r} for e, r in ratios.items())
    return table(*rows).assign(**columns)


def test_epsilon():
    assert criteria.savings_fall_with_epsilon(sweep({-1: 0.7, -10: 0.7, -40: 0.6})).met
    assert criteria.savings_fall_with_epsilon(sweep({-40: 0.7, -1: 0.6})).met is False
    assert criteria.savings_fall_with_epsilon(sweep({-40: 0.7, -1: 0.7})).met is False
    assert criteria.savings_fall_with_epsilon(sweep({-1: 0.7})).met is None
    assert criteria.default_nearly_optimal(sweep({-1: 0.74, -10: 0.7})).met
    assert criteria.default_nearly_optimal(sweep({-1: 0.76, -10: 0.7})).met is False
    assert criteria.default_nearly_optimal(sweep({-1: 0.76, -5: 0.7})).met is None
    close = sweep({-1: 0.7, -10: 0.7, -40: 0.6}, loss_nats=[3.1, 3.0005, 3.0])
    assert criteria.loss_unmoved(close).met
    assert criteria.loss_unmoved(close.assign(loss_nats=[3.0, 3.002, 3.0])).met is False
    assert criteria.loss_unmoved(close[:2]).met is None


def test_pruned_mass_against_its_bound():
    both = sweep({-1: 0.7, -10: 0.7}, largest_pruned_mass=[0.3, math.exp(-10.1)])
    assert criteria.swept_mass_below_epsilon(both).met
    # Over e^-10 = 4.5e-5, though far under e^-1.
    over = criteria.swept_mass_below_epsilon(both.assign(largest_pruned_mass=[0.3, 1e-4]))
    assert over.met is False and r"$1.0 \times 10^{-4}$" in over.ours
    nothing = both.assign(largest_pruned_mass=[float("nan")] * 2)
    assert criteria.swept_mass_below_epsilon(nothing).met is None
    assert criteria.mass_below_epsilon(table({"largest_pruned_mass": 0.0})).met
    assert criteria.mass_below_epsilon(table({"largest_pruned_mass": 5e-5})).met is False


def test_blocks_and_long_contexts():
    sizes = table({"block_tokens": 32, "pruned_ratio": 0.74}, {"block_tokens": 64, "pruned_ratio": 0.7})
    assert criteria.block_size_negligible(sizes).met
    assert criteria.block_size_negligible(sizes.assign(pruned_ratio=[0.76, 0.7])).met is False
    assert criteria.block_size_negligible(sizes[:1]).met is None
    longer = table(
        {"evaluated_length_tokens": 1024, "pruned_ratio": 0.8},
        {"evaluated_length_tokens": 512, "pruned_ratio": 0.7},
    )
    assert criteria.savings_grow_past_training(longer).met
    assert criteria.savings_grow_past_training(longer.assign(pruned_ratio=0.7)).met is False


def test_every_claim_says_what_it_checks_and_where_the_paper_says_it():
    claims = [claim for item in ITEMS for claim in item.claims]
    assert len({item.name for item in ITEMS}) == len(ITEMS) and len(claims) > 20
    for claim in claims:
        assert (
            claim.quantities
            and claim.holds_if
            and claim.paper.split()[0] in ("Abstract:", "Section", "Appendix", "Figure")
        )


@pytest.mark.parametrize("item", [item for item in ITEMS if item.claims], ids=lambda item: item.name)
def test_claims_need_no_more_than_their_figure_is_drawn_from(item):
    assert all(set(claim.quantities) <= set(item.quantities) for claim in item.claims)
