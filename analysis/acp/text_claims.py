"""What the ACP paper says besides its figures and tables, in its own order.

Definitions, arithmetic and what it expects of later work are left out: there is nothing to check. A claim
that mathematics settles names the test that shows it on this code. One that is judged on the records of a
figure or table stands in the file of that.
"""

from __future__ import annotations

from acp_repro.pipeline.paper import Claim
from acp_repro.pipeline.papers.acp.cost import attention_share_of_flops

from ..verdict import Verdict
from . import by_length, figure2, figure3, figure5, figure6, figure_decode, figureA5, models, table1

SHARE_POINTS = 2.0  # what "roughly" is taken to mean of attention's share of all FLOPs
_SHOWN = "tests/attention/test_paper_text.py::"
_SEARCH = "tests/attention/test_boundary.py::test_parallel_search_is_algorithm_1"


def attention_share() -> Verdict:
    """Met if the formula gives attention the shares that the paper prints, within :data:`SHARE_POINTS`."""
    table = models.PUBLISHED.table.query("quantity == 'attention_share_of_flops'")
    table = table.astype({"context_length_tokens": int})
    percent = [
        100 * attention_share_of_flops(models.paper_size(row.size), row.context_length_tokens)
        for row in table.itertuples()
    ]
    met = ((table["low"] - percent).abs() <= SHARE_POINTS).all()
    return Verdict.of(bool(met), by_length.listed(table.assign(percent=percent), digits=1))


CLAIMS = (
    Claim(
        "FoX is as good as a Transformer with RoPE, or better",
        "Abstract and Section 1, of Lin et al. (2025): consistently better or on-par performance",
        untested="no suite trains a Transformer with RoPE",
    ),
    figure2.SPED_UP,
    Claim(
        "Forgetting attention can be computed in FlashAttention's blocks",
        "Sections 1 and 2: compatible with FlashAttention, as D = c 1ᵀ − 1 cᵀ",
        "outputs and all gradients computed by blocks equal those of the equations, up to rounding",
        test="tests/attention/test_attention.py::test_blockwise_against_reference",
    ),
    Claim(
        "D is monotone in both coordinates",
        "Section 2: $D_{ij} \\leq D_{xy}$ for i ≥ x and j ≤ y",
        "no entry of D grows down a column or shrinks along a row, under mild, strong and closed gates",
        test=f"{_SHOWN}test_the_decay_bias_is_monotone_in_both_coordinates",
    ),
    Claim(
        "A weight whose $D_{ij}$ is far below −2U is negligible",
        "Section 3: by the bound exp(2U − $D_{ij}$)",
        "the bound as printed is below 1 for some $D_{ij}$ under −2U",
        test=f"{_SHOWN}test_the_bound_printed_in_section_3_is_never_below_one",
        refuted="a misprint: this bound is never below 1, because no $D_{ij}$ is positive. "
        "exp(2U + $D_{ij}$), as in Appendix A, gives what is claimed",
    ),
    Claim(
        "Pruning is safe: the pruned weights of a row sum to less than epsilon",
        "Abstract, Section 3 and Appendix A: provably safe with δ = −2U − log L + log ε",
        "the sum is below epsilon in random rows and in the worst case. Blocks of several sizes are tested, "
        "in float32 and bfloat16",
        test="tests/attention/test_threshold.py::test_pruned_weights_of_every_row_sum_below_epsilon",
    ),
    Claim(
        "Every pruned weight is at most ε / L",
        "Appendix A, Equations 4 to 6",
        "no pruned weight of random rows is above epsilon over the length, in float64",
        test=f"{_SHOWN}test_every_pruned_weight_is_at_most_epsilon_over_the_length",
    ),
    Claim(
        "With $\\epsilon = e^{-10}$ attention outputs hardly change",
        "Section 3: the impact of ACP on attention outputs is negligible",
        "no output moves by more than 2 ε max|v|, the bound that follows from Appendix A",
        test="tests/attention/test_attention.py::"
        "test_pruning_changes_the_output_by_no_more_than_appendix_a_proves",
    ),
    Claim(
        "Rounding to bfloat16 errs by about 0.001",
        "Section 3, footnote 1: the typical relative rounding error is on the order of 0.001",
        "the mean relative error of rounding random numbers is between 0.0005 and 0.005",
        test=f"{_SHOWN}test_bfloat16_rounds_by_about_a_thousandth",
    ),
    Claim(
        "Norms of queries and keys bound every score",
        "Section 3: $U = \\rho_q \\rho_k / \\sqrt{d}$",
        "no score of random queries and keys exceeds the bound, in float32 and lower precision",
        test="tests/attention/test_threshold.py::test_norm_bound_covers_every_score",
    ),
    Claim(
        "One entry decides a block: its top right one is its largest",
        "Section 3: a block is pruned if and only if all its entries are below delta",
        "left of the boundary every entry is below delta, and each boundary block has one that is not",
        test=_SEARCH,
    ),
    Claim(
        "Pruned blocks are one region left of a boundary, like a sliding window",
        "Sections 1, 3 and 5: a consecutive region on the lower left of the grid",
        "no row begins left of the row above it, and none past its diagonal block",
        test=_SEARCH,
    ),
    Claim(
        "No computation is spent on pruned blocks",
        "Sections 1 and 3: no computations would be wasted on the pruned blocks",
        "the FLOPs of the matrix products, forward and backward, are those of the kept blocks",
        test="tests/attention/test_attention.py::test_pruned_blocks_cost_no_work",
    ),
    Claim(
        "Keys and values of pruned blocks are not loaded",
        "Section 3: the kernel also skips the corresponding memory accesses",
        "keys and values that every row prunes may hold NaN: outputs and gradients do not change (on a CPU)",
        test=f"{_SHOWN}test_keys_and_values_of_pruned_blocks_are_not_read",
    ),
    Claim(
        "Algorithm 1 finds the boundary blocks",
        "Section 3, Algorithm 1 as printed",
        "the algorithm as printed gives the first block of each row that is not pruned",
        test=f"{_SHOWN}test_algorithm_1_as_printed_skips_boundary_blocks",
        refuted="a misprint: `l` is raised before $n_m = l$ is set, so rows begin after their boundary "
        "block. In the other order the algorithm is right",
    ),
    Claim(
        "The boundary search takes linear time",
        "Section 3 and Appendix D: $O(\\max(L / B_q, L / B_k))$",
        "Algorithm 1 without its misprint looks at no more blocks than there are rows and columns of blocks",
        test=f"{_SHOWN}test_algorithm_1_looks_at_no_more_blocks_than_rows_and_columns",
    ),
    figureA5.SETTLES,
    Claim(
        "Attention takes 16 % of the FLOPs of the 760M model at 4k tokens, and 45 % at 16k",
        "Section 4.2: roughly 16 % of the total FLOPs, and around 45 %",
        f"the formula for FLOPs gives both within {SHARE_POINTS:g} percentage points",
        check=attention_share,
        test="tests/model/test_model_flops.py::test_flops_by_hand",
    ),
    figure3.EVERY_PAIR,
    table1.SEEDS_DIFFER,
    figure5.LIKE_THE_MODEL,
    figure5.PRUNE_MOST_OR_NONE,
    figure6.SPARSE,
    Claim(
        "The three shapes have 125M, 360M and 760M weights",
        "Appendix B, Table 2, and Table 1: roughly 760M non-embedding parameters",
        "their weights without the input embedding are within 3 % of these numbers",
        test="tests/test_plan.py::test_sizes_of_the_paper_have_the_weights_of_their_names",
    ),
    Claim(
        "Weights of QK-norm bound every score",
        "Appendix E: $U = \\gamma^k \\gamma^q \\sqrt{d}$",
        "no score exceeds the bound, whatever rounding does to queries, keys and weights",
        test="tests/attention/test_threshold.py::test_qk_norm_bound_covers_the_rounded_products",
    ),
    Claim(
        "Prefill and decoding can be pruned too",
        "Section 4 and Appendix F: applies to both pretraining and inference",
        "logits of prefill and decoding in parts differ from those of one pass by less than epsilon",
        test="tests/model/test_model_cache.py::test_decoding_with_pruning_stays_within_epsilon",
    ),
    Claim(
        "While decoding, the boundary never moves back, so pruned keys and values can be dropped",
        "Appendix F: j never decreases",
        "no row begins left of the row above it. Each step is a row, and all steps have one delta",
        test=_SEARCH,
    ),
    figure_decode.SHRINKS,
    Claim(
        "Decoding skips as much as training does",
        "=decoding.memory_access_reduction",
        "under one delta each step of decoding begins at the block where the row of training begins, or "
        "after it. So decoding skips at least what the figures of training say",
        test=f"{_SHOWN}test_a_step_of_decoding_begins_no_earlier_than_the_row_of_training",
    ),
    figure_decode.SPED_UP,
    figure_decode.GAINS_GROW,
    figure_decode.NOT_FASTER,
)
