"""What the ACP paper says besides its figures and tables, in its own order.

Definitions, arithmetic and what it expects of later work are left out: there is nothing to check. A claim
that mathematics settles names the test that shows it on this code.
"""

from __future__ import annotations

from acp_repro.chain.paper import Claim

from .claims import LAYERS_EFFECT, SETTLED_PERCENT, SHARE_POINTS, SPARSE_PERCENT, TASKS_P_VALUE

_SHOWN = "tests/attention/test_paper_text.py::"
_SEARCH = "tests/attention/test_boundary.py::test_parallel_search_is_algorithm_1"

CLAIMS = (
    Claim(
        "FoX is as good as a Transformer with RoPE, or better",
        "Abstract and Section 1, of Lin et al. (2025): consistently better or on-par performance",
        untested="no suite trains a Transformer with RoPE",
    ),
    Claim(
        "Attention is 2 to 3 times as fast",
        "=figure2.attention_speedup",
        "at every size and context length exact attention takes 2 to 3 times the time of attention with ACP",
        ("attention_time",),
        "attention_sped_up",
        item="figure2",
    ),
    Claim(
        "Forgetting attention can be computed in FlashAttention's blocks",
        "Sections 1 and 2: compatible with FlashAttention, as D = c 1ᵀ − 1 cᵀ",
        "outputs and all gradients by blocks are those of the equations, up to rounding",
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
        refuted="a misprint: this bound is never below 1, as no $D_{ij}$ is positive; exp(2U + $D_{ij}$), as "
        "in Appendix A, gives what is claimed",
    ),
    Claim(
        "Pruning is safe: the pruned weights of a row sum to less than epsilon",
        "Abstract, Section 3 and Appendix A: provably safe with δ = −2U − log L + log ε",
        "of random rows and of the worst case, by blocks of several sizes, in float32 and bfloat16, the "
        "pruned weights sum to less than epsilon",
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
        "no output moves by more than 2 ε max|v|, which is what follows from Appendix A",
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
        "where every row prunes keys and values, these may hold NaN, and outputs and gradients stay as they "
        "are (on a CPU)",
        test=f"{_SHOWN}test_keys_and_values_of_pruned_blocks_are_not_read",
    ),
    Claim(
        "Algorithm 1 finds the boundary blocks",
        "Section 3, Algorithm 1 as printed",
        "the algorithm as printed gives the first block of each row that is not pruned",
        test=f"{_SHOWN}test_algorithm_1_as_printed_passes_over_boundary_blocks",
        refuted="a misprint: `l` is raised before $n_m = l$ is set, so rows begin after their boundary "
        "block; set first, the algorithm is right",
    ),
    Claim(
        "The boundary search takes linear time",
        "Section 3 and Appendix D: $O(\\max(L / B_q, L / B_k))$",
        "Algorithm 1, set right, looks at no more blocks than there are rows and columns of blocks",
        test=f"{_SHOWN}test_algorithm_1_looks_at_no_more_blocks_than_rows_and_columns",
    ),
    Claim(
        "Throughput falls at the beginning of training and then stays level",
        "Section 4.1: decreases for a short period at the beginning of training and then plateaus",
        f"with ACP the first tenth of a training is faster than the last by more than {SETTLED_PERCENT:g} %, "
        f"and no tenth of its second half is further than {SETTLED_PERCENT:g} % from it (medians of steps)",
        ("training_log",),
        "throughput_settles",
        item="figureA5",
    ),
    Claim(
        "Attention takes 16 % of the FLOPs of the 760M model at 4k tokens, and 45 % at 16k",
        "Section 4.2: roughly 16 % of the total FLOPs, and around 45 %",
        f"the formula for FLOPs gives both within {SHARE_POINTS:g} percentage points",
        check="attention_share",
        test="tests/model/test_model_flops.py::test_flops_by_hand",
    ),
    Claim(
        "Downstream results vary between seeds of one setting",
        "Section 4.2, of Madaan et al. (2024): high variance across training runs",
        "a column differs between two seeds of one setting by more than chance: a paired test over the same "
        f"items gives p < {TASKS_P_VALUE:g} after Holm's correction for all columns and settings; where none "
        "does, it cannot be told",
        ("lm_eval_items",),
        "seeds_differ",
        item="table1",
    ),
    Claim(
        "Layers are like the whole model, but for the first two",
        "Section 4.3: the distribution for each layer matches the distribution for the entire model",
        "the 95 % upper bound of how far the kinds of heads (local, global, between) differ between the "
        f"layers past the second is under {LAYERS_EFFECT:g} (Cohen's w; a medium effect); it fails where "
        "heads that are shuffled among these layers differ as much in fewer than 5 % of cases; where neither "
        "is so, "
        "there are too few heads in a layer, and it cannot be told",
        ("pruned_ratio",),
        "layers_match_model",
        item="figure5",
    ),
    Claim(
        "Local heads prune most blocks, and a global head none",
        "Section 4.3, Figure 6: local heads, most off-diagonal blocks pruned; a global head, none",
        "every local head prunes more than half of its blocks, and at least one head prunes none",
        ("pruned_ratio",),
        "local_and_global_heads",
        item="figure5",
    ),
    Claim(
        "Attention weights are very sparse",
        "Figure 6: since A is very sparse, only entries larger than 0.1 are shown",
        f"under {SPARSE_PERCENT:g} % of the causal entries of the heads shown are over 0.1",
        ("decay", "attention_weights"),
        "weights_sparse",
        item="figure6",
    ),
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
        "with one delta for all steps, and a step a row, no row begins left of the row above it",
        test=_SEARCH,
    ),
    Claim(
        "Dropping pruned keys and values saves memory while decoding",
        "Appendix F and Section 6: thus reducing memory consumption and memory accesses",
        "at every batch and length the cache of a whole model allocates fewer bytes with ACP; "
        "gates are drawn, two heads in three local",
        ("decode_time",),
        "cache_shrinks",
        item="figure_decode",
    ),
    Claim(
        "Decoding skips as much as training does",
        "=decoding.memory_access_reduction",
        "under one delta each step of decoding begins at the block where training's row begins, or after it: "
        "so it skips what the figures of training say, or more",
        test=f"{_SHOWN}test_a_step_of_decoding_begins_no_earlier_than_the_row_of_training",
    ),
    Claim(
        "Attention takes 50 % to 60 % less time in a decoding step",
        "=decoding.attention_time_reduction",
        "the time of attention falls by the paper's range with prompts of at least 16k tokens for at least "
        "16 rows; gates are drawn, two heads in three local",
        ("decode_time",),
        "decoding_attention_sped_up",
        item="figure_decode",
    ),
    Claim(
        "Attention in decoding gains most with long prefill and large batches",
        "Appendix F: wall-clock time improvement is most obvious there",
        "the share of attention's time that ACP saves is larger for the longer of two prompts of one batch, "
        "and for the larger of two batches of one prompt, within a tenth",
        ("decode_time",),
        "decoding_gains_grow",
        item="figure_decode",
    ),
    Claim(
        "Decoding as a whole is not clearly faster",
        "Appendix F: no clear improvement in end-to-end decoding throughput, as kernel launches bound it",
        "no whole step is more than a tenth faster with ACP",
        ("decode_time",),
        "decoding_not_faster",
        item="figure_decode",
    ),
)
