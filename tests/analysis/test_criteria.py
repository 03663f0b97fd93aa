"""The criteria of ACP's claims: small results that can be checked by hand, with their expected verdicts."""

import math

import pandas as pd
import pytest

from analysis.acp import (
    figure2,
    figure4,
    figure5,
    figure6,
    figure7,
    figure_decode,
    figureA1,
    figureA2,
    figureA5,
    needle_facts,
    statistics,
    table4,
    table_speed,
)
from analysis.tables import UnfitRecords
from analysis.verdict import Word, in_range

MEASURED, OTHER, NO, UNTOLD = Word.REPRODUCED, Word.MAGNITUDE, Word.CONTRADICTED, Word.INCONCLUSIVE
RUN = {
    "run": "one",
    "architecture": "pro",
    "size": "a",
    "context_length_tokens": 512,
    "seed": 0,
    "log_pruning_tolerance": -10.0,
    "trained_tokens": 10**9,
    "device": "a GPU",
}
MOST = 36 / 55  # of ten by ten blocks: each row keeps the diagonal block and its predecessor


def table(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame([RUN | row for row in rows])


def blocks(*pruned: int, lengths=(512, 1024), **columns) -> pd.DataFrame:
    """One head per run that prunes ``pruned`` of 100 blocks."""
    sides = {"layer": 0, "head": 0, "causal_blocks": 100, "block_q_tokens": 16, "block_k_tokens": 16}
    return table(
        *(
            sides | {"context_length_tokens": length, "pruned_blocks": p} | columns
            for p, length in zip(pruned, lengths, strict=False)
        )
    )


def both(*tables: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(tables)


def sides(column: str, acp: float, exact: float, **columns) -> pd.DataFrame:
    return table({"method": "acp", column: acp}, {"method": "exact", column: exact}).assign(**columns)


def times(acp: float) -> pd.DataFrame:
    return sides("forward_ms", acp, 2.0, backward_ms=0.0)


def rates(acp: float) -> pd.DataFrame:
    return sides("throughput_tokens_per_s", acp, 100.0)


def heads(*ratios: float, layers=None, length: int = 640, run: str = "one") -> pd.DataFrame:
    """Heads of ten by ten blocks that prune the given shares of their maximum."""
    grid = {"context_length_tokens": length, "block_q_tokens": 64, "block_k_tokens": 64}
    layers = layers or [0] * len(ratios)
    return table(
        *(
            grid | {"run": run, "layer": layer, "head": i, "pruned_ratio": r * MOST, "pruned_blocks": r * 36}
            for i, (r, layer) in enumerate(zip(ratios, layers, strict=True))
        )
    )


def layers(*counts: tuple[int, int, int], run: str = "one") -> pd.DataFrame:
    """Two local layers, followed by layers with the given numbers of local, global and intermediate heads."""
    drawn = [
        [share for share, n in zip((1.0, 0.0, 0.5), layer, strict=True) for _ in range(n)] for layer in counts
    ]
    numbers = [0, 1, *(2 + i for i, layer in enumerate(drawn) for _ in layer)]
    return heads(1.0, 1.0, *(share for layer in drawn for share in layer), layers=numbers, run=run)


def speeds(*tenths: float, layer=0) -> pd.DataFrame:
    steps = [(2 * i + j + 1, speed) for i, speed in enumerate(tenths) for j in range(2)]
    return table(*({"tokens": n, "layer": layer, "throughput_tokens_per_s": speed} for n, speed in steps))


def sweep(ratios: dict[float, float], **columns) -> pd.DataFrame:
    rows = ({"swept_log_pruning_tolerance": e, "block_pruned_ratio": r} for e, r in ratios.items())
    return table(*rows).assign(**columns)


def sizes(**percent: float) -> pd.DataFrame:
    return table(*({"block_tokens": int(n[1:]), "pruned_ratio": p / 100} for n, p in percent.items()))


def steps(implementation: str, *pairs: tuple[float, float], scope="model") -> pd.DataFrame:
    """Decoding with ACP and exact, for 16 prompts of 16k and of 64k tokens."""
    rows = [
        {
            "scope": scope,
            "implementation": implementation,
            "batch": 16,
            "length_tokens": length,
            "method": method,
        }
        | {"step_ms": ms, "kept_bytes": ms, "allocated_bytes": ms * 2**30}
        for length, pair in zip((16_384, 65_536), pairs, strict=False)
        for method, ms in zip(("acp", "exact"), pair, strict=True)
    ]
    return pd.DataFrame(rows)


HEAD = {"layer": 0, "head": 0}
YOUNG = {"size": "1M", "trained_tokens": 500_000}
LEVEL = [1000.0] * 5
FAST, SLOW = (speeds(first, 1100, 900, 1050, 1000, *LEVEL) for first in (1200, 1040))
DRAWN = [(11, 0, 1), (8, 1, 3), (11, 0, 1), (12, 0, 0), (7, 2, 3)]
DRAWN += [(10, 0, 2), (10, 1, 1), (6, 4, 2), (8, 3, 1), (9, 1, 2)]
ALIKE, SPLIT, RARE = [(9, 1, 2)] * 10, [(12, 0, 0), (0, 12, 0)] * 5, [*[(8, 0, 4)] * 4, (5, 4, 3)]
LIKE = {"size": "760M", "context_length_tokens": 4096}
SWEEP = sweep({-1: 0.7, -10: 0.7, -40: 0.6}, loss_nats=[3.1, 3.0005, 3.0])
MASS = sweep({-1: 0.7, -10: 0.7}, largest_pruned_mass=[0.3, math.exp(-10.1)])
AUTHORS, SLOWER = (steps("official", (ms, 2.0), scope="attention") for ms in (0.9, 2.1))
OURS, GAINED = steps("triton", (1.0, 2.2), (1.0, 2.2)), steps("official", (1.0, 1.2))
CASES = [
    # The longest context of every size counts; sizes do not compensate for each other.
    (figure2.pruned_at_longest, blocks(10, 70), MEASURED),
    (figure2.pruned_at_longest, both(blocks(10, 70), blocks(60, 81, size="b")), OTHER),
    (figure2.pruned_at_longest, both(blocks(70, 10), blocks(60, 81, size="b")), OTHER),
    (figure2.pruned_at_longest, blocks(70, 0), NO),
    # Undertrained runs decide only if no other runs exist.
    (figure2.pruned_at_longest, both(blocks(60, 70), blocks(70, 90, **YOUNG)), MEASURED),
    (figure2.pruned_at_longest, blocks(70, 90, **YOUNG), OTHER),
    (figure2.savings_grow, blocks(50, 60), MEASURED),
    (figure2.savings_grow, blocks(60, 60), NO),
    (figure2.savings_grow, blocks(60), UNTOLD),  # one context alone says nothing of growth
    (figure2.savings_grow, both(blocks(50, 60), blocks(60, 50, size="b")), NO),
    (figure2.savings_grow, blocks(60, 50, lengths=(1024, 512)), MEASURED),
    # 496 of 528 blocks are off the diagonal at 512 tokens and 2,016 of 2,080 at 1k, so 1 point more is less.
    (figure2.savings_grow, blocks(60, 61), NO),
    (figure2.sizes_alike, both(blocks(50, 60), blocks(51, 61.9, size="b")), MEASURED),
    (figure2.sizes_alike, both(blocks(50, 60), blocks(51, 62, size="b")), NO),
    (figure2.savings_grow, both(blocks(50, 60), blocks(70, 60, **YOUNG)), MEASURED),
    (figure2.time_saved, times(1.0), MEASURED),
    (figure2.time_saved, times(1.1), OTHER),
    (figure2.time_saved, times(0.58), OTHER),
    (figure2.time_saved, times(2.1), NO),
    (figure2.throughput_gained, rates(120.0), MEASURED),
    (figure2.throughput_gained, rates(207.0), OTHER),
    (figure2.throughput_gained, rates(109.0), OTHER),
    (figure2.throughput_gained, rates(99.0), NO),
    (figure2.attention_sped_up, times(0.8), MEASURED),
    (figure2.attention_sped_up, times(0.5), OTHER),
    (figure2.attention_sped_up, times(2.1), NO),
    *(
        (
            table4.search_is_cheap,
            sides("forward_ms", 50.0, 90.0, backward_ms=50.0, boundary_search_ms=ms),
            word,
        )
        for ms, word in ((6.0, MEASURED), (6.1, NO), (1.9, OTHER))
    ),
    (figure4.heads_bimodal, heads(1, 1, 0, 0.5), MEASURED),
    (figure4.heads_bimodal, heads(1, 1, 0.5), NO),  # no global head
    (figure4.heads_bimodal, heads(1, 0, 0.5, 0.5), NO),  # as many intermediate heads
    (figure4.heads_bimodal, heads(0.0, length=128), UNTOLD),  # two by two blocks: nothing can be pruned
    (figure4.most_heads_local, heads(1, 1, 0.5), MEASURED),
    (figure4.most_heads_local, heads(1, 0.5), NO),
    # The model of the paper's figure decides; a failure requires a tenth of its training tokens.
    (figure5.first_layers_local, heads(1, 1, 0.1, layers=[0, 1, 2]).assign(**LIKE), MEASURED),
    (figure5.first_layers_local, heads(1, 0.1, 1, layers=[0, 1, 2]).assign(**LIKE), UNTOLD),
    (
        figure5.first_layers_local,
        heads(1, 0.1, 1, layers=[0, 1, 2]).assign(**LIKE | {"trained_tokens": 2e9}),
        NO,
    ),
    (figure5.first_layers_local, heads(1, 1, 1, layers=[0, 1, 2]), UNTOLD),
    (figure4.every_run_bimodal, both(heads(1, 1, 0), heads(1, 0, run="b")).assign(suite="s"), MEASURED),
    (figure4.every_run_bimodal, both(heads(1, 1, 0), heads(1, 1, run="b")).assign(suite="s"), NO),
    (figure5.layers_match_model, layers(*ALIKE), MEASURED),
    (figure5.layers_match_model, layers(*[(12, 0, 0)] * 3), MEASURED),
    (figure5.layers_match_model, layers(*DRAWN), UNTOLD),  # sampled from one model: explained by chance
    (figure5.layers_match_model, layers((2, 1, 0), (3, 0, 0)), UNTOLD),
    (figure5.layers_match_model, layers(*SPLIT), NO),
    (figure5.layers_match_model, both(layers(*ALIKE, run="b"), layers(*SPLIT)), NO),
    (figure5.layers_match_model, layers(*RARE), NO),  # 2.3 % of cases, too rare for three runs
    (figure5.layers_match_model, both(*(layers(*RARE, run=run) for run in "abc")), UNTOLD),
    (figure5.a_head_prunes_nothing, heads(1.0, 0.0), MEASURED),
    (figure5.a_head_prunes_nothing, heads(1.0, 0.1), NO),
    (figureA5.throughput_settles, FAST, MEASURED),
    (figureA5.throughput_settles, both(FAST, SLOW.assign(run="b", size="b")), OTHER),  # a little slower
    (figureA5.throughput_settles, speeds(1040, *[1000] * 7, 1045, 1000), NO),  # within its variation
    (figureA5.throughput_settles, speeds(1200, *[1000] * 6, 1060, 1000, 1000), NO),  # not level
    (figure7.savings_fall_with_epsilon, SWEEP, MEASURED),
    (figure7.savings_fall_with_epsilon, sweep({-40: 0.7, -1: 0.6}), NO),
    (figure7.savings_fall_with_epsilon, sweep({-1: 0.7}), UNTOLD),
    (figure7.default_nearly_optimal, sweep({-1: 0.74, -10: 0.7}), MEASURED),
    (figure7.default_nearly_optimal, sweep({-1: 0.76, -10: 0.7}), NO),
    (figure7.default_nearly_optimal, sweep({-1: 0.76, -5: 0.7}), UNTOLD),
    (figure7.loss_unmoved, SWEEP, MEASURED),
    (figure7.loss_unmoved, SWEEP.assign(loss_nats=[3.0, 3.002, 3.0]), NO),
    (figure7.loss_unmoved, SWEEP[:2], UNTOLD),
    (figure7.swept_mass_below_epsilon, MASS, MEASURED),
    (figure7.swept_mass_below_epsilon, MASS.assign(largest_pruned_mass=[0.3, 1e-4]), NO),  # over e^-10
    (figure7.swept_mass_below_epsilon, MASS.assign(largest_pruned_mass=[math.nan] * 2), UNTOLD),
    (figureA1.mass_below_epsilon, table({"largest_pruned_mass": 0.0}), MEASURED),
    (figureA1.mass_below_epsilon, table({"largest_pruned_mass": 5e-5}), NO),
    (figureA2.block_size_negligible, sizes(b16=74, b32=73, b64=71, b128=70), MEASURED),
    (figureA2.block_size_negligible, sizes(b16=76, b32=74, b64=71, b128=69), UNTOLD),
    (figureA2.block_size_negligible, sizes(b32=76, b64=70), NO),
    (figureA2.block_size_negligible, sizes(b32=76), UNTOLD),
    (figure_decode.cache_shrinks, OURS, MEASURED),
    (figure_decode.cache_shrinks, steps("triton", (1.0, 1.0)), NO),
    # The authors' attention decides.
    (
        figure_decode.decoding_attention_sped_up,
        both(AUTHORS, steps("triton", (2.0, 2.0), scope="attention")),
        MEASURED,
    ),
    (
        figure_decode.decoding_attention_sped_up,
        both(SLOWER, steps("triton", (0.9, 2.0), scope="attention")),
        NO,
    ),
    # Our model in CUDA graphs is no evidence for the authors' model.
    (figure_decode.decoding_not_faster, OURS, UNTOLD),
    (figure_decode.decoding_not_faster, both(OURS, steps("official", (1.0, 1.05))), MEASURED),
    (figure_decode.decoding_not_faster, both(GAINED, steps("official", (1.0, 1.0))), NO),  # any timing counts
    (figure_decode.graphs_help, steps("triton", (1.0, 1.3)), MEASURED),
    (figure_decode.graphs_help, OURS, OTHER),
]


@pytest.mark.parametrize(("check", "records", "word"), CASES, ids=lambda one: getattr(one, "__name__", ""))
def test_verdicts(check, records, word):
    assert check(records).word is word


def test_large_weights_are_few():
    decay = table(
        *({**HEAD, "position": i, "first_kept_key_position": min(i, 1)} for i in range(19))
    )  # 190 entries
    weights = table({**HEAD, "query_position": 1, "key_position": 1})
    assert figure6.weights_sparse(decay, weights).word is MEASURED
    assert figure6.weights_sparse(decay, both(*[weights] * 2)).word is NO
    assert figure6.large_weights_kept(decay, weights).word is MEASURED
    assert figure6.large_weights_kept(decay, weights.assign(key_position=0)).word is NO


def test_values_match_the_measurements():
    assert figure2.throughput_gained(rates(120.0)).values == pytest.approx({"a at 512": 20.0})
    with pytest.raises(ValueError, match="item 7 is nan"):
        in_range(pd.Series([3.0, math.nan], index=[1, 7]), 2, 6, "a")


def test_tolerances_are_never_averaged():
    """A mean of 110 tokens per second over 200 and 20 must not be reported."""
    grid = both(*(rates(fast).assign(log_pruning_tolerance=e) for e, fast in ((-10.0, 200.0), (-1.0, 20.0))))
    assert statistics.throughput_gain(grid)["acp"].tolist() == [200.0, 20.0]
    for twice in (grid, both(rates(120.0), rates(120.0)[:1])):
        with pytest.raises(UnfitRecords, match="more than one record for"):
            figure2.throughput_gained(twice)
    with pytest.raises(UnfitRecords):
        figure2.pruned_at_longest(both(blocks(70), blocks(60).assign(log_pruning_tolerance=-1.0)))


def test_same_weights_are_compared_prompt_by_prompt():
    prompt = {"suite": "s", "needle_fraction": 0.75, "evaluated_length_tokens": 512, "depth": 0.5}
    prompt |= {"haystack_sample": 0, "answer_log_likelihood_nats": -2.0, "answer": "a"}
    rows = [prompt | {"fact": fact, "method": method} for fact in (0, 1) for method in ("acp", "exact")]
    same = needle_facts.same_weights(table(*rows))
    assert (same.word, same.n) == (MEASURED, 1)
    rows[0] |= {"answer_log_likelihood_nats": -2.5, "answer": "b"}
    assert needle_facts.same_weights(table(*rows)).word is NO
    assert needle_facts.same_weights(table(*rows[:1])).word is UNTOLD


def test_speed_is_judged_only_at_the_papers_pruned_ratio():
    """The authors' kernels decide; our kernels are quoted and other baselines are not."""
    shape = {"length_tokens": 4096, "heads": 12, "head_dim": 64, "device": "a GPU"}
    baselines = {"triton": (9.0, 10.0), "official": (4.0, 10.0), "flex": (1.0, 10.0)}
    kernels = pd.DataFrame(
        {**shape, "implementation": name, "method": method, "pruned_ratio": 0.67 * (method == "acp")}
        | {"forward_backward_ms": ms}
        for name, pair in baselines.items()
        for method, ms in zip(("acp", "exact"), pair, strict=True)
    )
    verdict = table_speed.attention_saved(kernels)
    assert verdict.word is MEASURED and "10 % at 4k" in verdict.ours
    with pytest.raises(UnfitRecords, match="another share than 65 to 70 %"):
        table_speed.attention_saved(kernels.assign(pruned_ratio=0.64))
    trainings = kernels.assign(size="1M-recomputed", context_length_tokens=4096, ranks=1)
    trainings["throughput_tokens_per_s"] = 100 / trainings["forward_backward_ms"]
    assert table_speed.training_sped_up(trainings).word is OTHER
