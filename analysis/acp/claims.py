"""Every claim of the ACP paper: its words and place, and the criterion by which it holds here.

Definitions, arithmetic and what the paper expects of later work are left out. A claim that mathematics
settles names the test that shows it on this code.
"""

from __future__ import annotations

import dataclasses

from acp_repro.common.grid import GLOBAL, LOCAL
from acp_repro.pipeline.paper import Claim

from . import (
    by_length,
    figure2,
    figure3,
    figure3_right,
    figure4,
    figure5,
    figure6,
    figure7,
    figure_decode,
    figureA1,
    figureA2,
    figureA5,
    needle_facts,
    needle_statistics,
    sweeps,
    table1,
    table4,
    table_speed,
)

_LOSS = (
    "two one-sided tests at 5 % show that the mean difference of held-out losses is under "
    f"{figure3.LOSS_WITHIN_NATS} nats a token. The unit of the tests is a pair of trainings. A pair with two "
    "versions of the code, marked †, is not counted. The margin is half of the largest difference between "
    "the paper's own pairs on Wikitext (Tables 1 and 3, in nats a word). Half, because a word is fewer than "
    "two tokens. The claim fails where the opposite test shows more. With one pair, or two of the same bits, "
    "it cannot be told"
)
_MATCH = "Section 4.2: the curves almost match exactly, within the expected variance across runs"
_KINDS = (
    f"A head is local if {100 * LOCAL:g} % or more of what the grid of blocks allows is pruned. It is "
    f"global if under {100 * GLOBAL:g} % of it is"
)
_SHOWN = "tests/attention/test_paper_text.py::"
_SEARCH = "tests/attention/test_boundary.py::test_parallel_search_is_algorithm_1"

FIGURE2 = (
    Claim(
        "About 70 % of the FLOPs and memory accesses are pruned",
        "=pruned_ratio",
        "every size prunes {:g} to {:g} % of its blocks at its longest context".format(
            *figure2.PRUNED_PERCENT
        ),
        ("pruned_ratio",),
        figure2.pruned_at_longest,
    ),
    Claim(
        "Savings grow with context length",
        "Abstract: longer context lengths yield greater computational savings",
        "every size prunes more at every longer context, and no smaller share of what the grid of blocks "
        "allows",
        ("pruned_ratio",),
        figure2.savings_grow,
    ),
    Claim(
        "Attention takes 50 % to 70 % less time",
        "=attention_time_reduction",
        "every size saves 50 to 70 % at every context length",
        ("attention_time",),
        figure2.time_saved,
    ),
    Claim(
        "Training throughput rises by 10 % to 40 %",
        "=throughput_gain",
        "every size gains 10 to 40 % at every context length",
        ("throughput",),
        figure2.throughput_gained,
    ),
    Claim(
        "Throughput gains grow with context length",
        "Section 4.2: longer training context lengths lead to greater throughput improvements",
        "every size gains more at every longer context",
        ("throughput",),
        figure2.gains_grow,
    ),
)
FIGURE3 = (Claim("ACP does not change the loss", _MATCH, _LOSS, ("loss",), figure3.losses_match),)
TABLE1 = (
    Claim(
        "ACP does not change downstream results",
        "Section 4.2: the downstream task performances of models with and without ACP are similar",
        "in every column two one-sided tests at 5 %, with Holm's correction for all columns, show a mean "
        "difference smaller than the largest of the paper's own pairs in that column. The unit of the tests "
        "is a pair of trainings. A pair with two versions of the code is not counted. Accuracies of which no "
        "exact model is better than guessing are left out, and the perplexities of their tasks, and those "
        "above the size of the vocabulary. The claim fails where the opposite test shows more in a column, "
        "with the same correction. With one pair, with two of the same bits, or with fewer than half of the "
        "columns left, it cannot be told",
        ("lm_eval_items",),
        table1.tasks_match,
    ),
)
FIGURE3_RIGHT = (
    Claim(
        "ACP does not damage retrieval",
        "Section 4.2: ACP also does not damage long-context retrieval performance",
        "at every training length the 95 % interval of the mean difference, ACP − exact, reaches 0 and "
        f"stays above −{figure3_right.RECALL_POINTS:g} points. The interval is over pairs of trainings, or "
        "over haystacks where one model is evaluated both ways. A length counts if exact attention finds "
        f"the needle there: a mean recall of {needle_statistics.FOUND_RECALL:g} or more of its words. "
        f"Where the interval reaches both 0 and −{figure3_right.RECALL_POINTS:g} points, or where there is "
        "one pair of trainings, it cannot be told. Models that were asked for many facts (Figure A6) are "
        "judged by the negative log-likelihood of the right answer instead. Its mean difference, ACP − "
        "exact, is over pairs of trainings, in one-sided t tests at 5 %. The claim holds if that is shown "
        f"to be below {needle_facts.MARGIN_NATS:g} nats, and is contradicted if it is shown to be above. "
        f"It cannot be told if neither test shows anything, with fewer than {needle_facts.LEAST_PAIRS} "
        "pairs, or where exact attention finds too few words",
        ("needle",),
        figure3_right.retrieval_kept,
    ),
)
FIGUREA6 = (dataclasses.replace(FIGURE3_RIGHT[0], quantities=("needle", "needle_facts")),)
FIGURE4 = (
    Claim(
        "Heads are either local or global",
        "Section 4.3: a clear bimodal pattern, most heads are local or global",
        f"there are local and global heads, and together they are more than the heads between. {_KINDS}",
        ("pruned_ratio",),
        figure4.heads_bimodal,
    ),
    Claim(
        "Most heads are local",
        "Section 4.3: a majority of the heads are local heads",
        f"more than half of the heads are local. {_KINDS}",
        ("pruned_ratio",),
        figure4.most_heads_local,
    ),
)
FIGURE5 = (
    Claim(
        "In the first two layers all heads are local",
        "Section 4.3, Figure 5",
        f"every head of the first two layers is local. {_KINDS}",
        ("pruned_ratio",),
        figure5.first_layers_local,
    ),
)
FIGURE6 = (
    Claim(
        "No attention weight over 0.1 is pruned",
        "Figure 6: entries of A larger than 0.1",
        "none of the attention weights over 0.1 lies left of the boundary",
        ("decay", "attention_weights"),
        figure6.large_weights_kept,
    ),
)
FIGURE7 = (
    Claim(
        "Savings fall with epsilon",
        "Section 4.3: with smaller epsilon the computational savings decrease",
        "no smaller epsilon prunes more, and the smallest prunes less than the largest",
        ("epsilon_sweep",),
        figure7.savings_fall_with_epsilon,
    ),
    Claim(
        "A larger epsilon gains only marginally",
        "Section 4.3: marginal gain from $e^{-1}$ over the default $e^{-10}$",
        f"$e^{{-1}}$ prunes less than {sweeps.MARGINAL_POINTS:g} percentage points more than $e^{{-10}}$",
        ("epsilon_sweep",),
        figure7.default_nearly_optimal,
    ),
    Claim(
        "Pruning at $e^{-10}$ does not change the loss",
        "Section 3: the impact of ACP on attention outputs is negligible",
        f"the loss at $e^{{-10}}$ is within {figure7.SAME_LOSS_NATS:g} nats of the loss at the smallest "
        "epsilon",
        ("epsilon_sweep",),
        figure7.loss_unmoved,
    ),
    Claim(
        "The pruned attention weight stays below every epsilon",
        sweeps.APPENDIX_A,
        "at every epsilon of the sweep the largest pruned mass of any row is below it",
        ("epsilon_sweep",),
        figure7.swept_mass_below_epsilon,
    ),
)
FIGUREA1 = (
    Claim(
        "Every head keeps the bound of Appendix A",
        sweeps.APPENDIX_A,
        "in every head the largest pruned mass of any row, in float64, is below epsilon",
        ("pruned_mass",),
        figureA1.mass_below_epsilon,
    ),
)
FIGUREA2 = (
    Claim(
        "The block size hardly matters",
        "Appendix B: blocks are much smaller than the sequence, so the difference is negligible",
        f"savings with blocks of 32 and of 64 differ by less than {figureA2.MARGINAL_POINTS:g} percentage "
        "points",
        ("block_size",),
        figureA2.block_size_negligible,
    ),
)
TABLE4 = (
    Claim(
        "The boundary search is cheap",
        "=boundary_search_share",
        "at every size and context length it takes 2 to 6 % of the attention time",
        ("attention_time",),
        table4.search_is_cheap,
    ),
)
TABLE_SPEED = (
    Claim(
        "At the paper's pruned share attention takes 50 % to 70 % less time",
        "=figure2.attention_time_reduction",
        f"{table_speed.DRAWN} Our attention saves 50 to 70 % at every context length, forward and backward",
        ("kernel_time",),
        table_speed.attention_saved,
    ),
    Claim(
        "At the paper's pruned share training throughput rises by 10 % to 40 %",
        "=figure2.throughput_gain",
        f"{table_speed.DRAWN} Our training gains 10 to 40 % at every context length, with and without "
        "gradient checkpointing",
        ("training_step",),
        table_speed.training_sped_up,
    ),
)
TEXT = (
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
        figure2.attention_sped_up,
        item="figure2",
    ),
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
    Claim(
        "Throughput falls at the beginning of training and then stays level",
        "Section 4.1: decreases for a short period at the beginning of training and then plateaus",
        "with ACP the first tenth of a training is faster than the last by more than "
        f"{figureA5.SETTLED_PERCENT:g} %. No tenth of its second half is further than "
        f"{figureA5.SETTLED_PERCENT:g} % from the last. Speeds are medians of steps. A smaller fall, which "
        "is yet more than the second half varies, is one of another size",
        ("training_log",),
        figureA5.throughput_settles,
        item="figureA5",
    ),
    Claim(
        "Attention takes 16 % of the FLOPs of the 760M model at 4k tokens, and 45 % at 16k",
        "Section 4.2: roughly 16 % of the total FLOPs, and around 45 %",
        f"the formula for FLOPs gives both within {by_length.SHARE_POINTS:g} percentage points",
        check=by_length.attention_share,
        test="tests/model/test_model_flops.py::test_flops_by_hand",
    ),
    Claim(
        "ACP does not change the loss, all pairs together",
        _MATCH,
        f"the pairs of Figures 3, 8 and 11 of all suites are one sample. T{_LOSS[1:]}",
        ("loss",),
        figure3.losses_match,
        item="figure3",
        pooled=True,
    ),
    Claim(
        "Downstream results vary between seeds of one setting",
        "Section 4.2, of Madaan et al. (2024): high variance across training runs",
        "a column differs between two seeds of one setting by more than chance. A paired test over the "
        f"same items must give p < {table1.paired.TASKS_P_VALUE:g} after Holm's correction for all columns "
        "and settings. Where no column differs, it cannot be told",
        ("lm_eval_items",),
        table1.seeds_differ,
        item="table1",
    ),
    Claim(
        "Layers are like the whole model, but for the first two",
        "Section 4.3: the distribution for each layer matches the distribution for the entire model",
        "in every run with ACP past the start of training the kinds of heads (local, global, between) "
        "differ little between the layers past the second. The 95 % upper bound of the effect is under "
        f"{figure5.LAYERS_EFFECT:g} (Cohen's w; a medium effect). The claim fails where in one of the "
        "other runs heads that are shuffled among these layers differ as much in fewer than 5 % of cases, "
        "after Holm's correction for these runs. Where neither is so, layers have too few heads, and it "
        "cannot be told",
        ("pruned_ratio",),
        figure5.layers_match_model,
        item="figure2",
    ),
    Claim(
        "Local heads prune most blocks, and a global head none",
        "Section 4.3, Figure 6: local heads, most off-diagonal blocks pruned; a global head, none",
        "every local head prunes more than half of its blocks, and at least one head prunes none",
        ("pruned_ratio",),
        figure5.local_and_global_heads,
        item="figure5",
    ),
    Claim(
        "Attention weights are very sparse",
        "Figure 6: since A is very sparse, only entries larger than 0.1 are shown",
        f"under {figure6.SPARSE_PERCENT:g} % of the causal entries of the heads shown are over 0.1",
        ("decay", "attention_weights"),
        figure6.weights_sparse,
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
        "no row begins left of the row above it. Each step is a row, and all steps have one delta",
        test=_SEARCH,
    ),
    Claim(
        "Dropping pruned keys and values saves memory while decoding",
        "Appendix F and Section 6: thus reducing memory consumption and memory accesses",
        "at every batch and length the cache of a whole model allocates fewer bytes with ACP. The gates are "
        "drawn so that two heads in three are local",
        ("decode_time",),
        figure_decode.cache_shrinks,
        item="figure_decode",
    ),
    Claim(
        "Decoding skips as much as training does",
        "=decoding.memory_access_reduction",
        "under one delta each step of decoding begins at the block where the row of training begins, or "
        "after it. So decoding skips at least what the figures of training say",
        test=f"{_SHOWN}test_a_step_of_decoding_begins_no_earlier_than_the_row_of_training",
    ),
    Claim(
        "Attention takes 50 % to 60 % less time in a decoding step",
        "=decoding.attention_time_reduction",
        "the time of attention falls by the paper's range. Batches have at least 16 prompts of at least 16k "
        "tokens. The gates are drawn so that two heads in three are local",
        ("decode_time",),
        figure_decode.decoding_attention_sped_up,
        item="figure_decode",
    ),
    Claim(
        "Attention in decoding gains most with long prefill and large batches",
        "Appendix F: wall-clock time improvement is most obvious there",
        "ACP saves a larger share of attention's time for the longer of two prompts of one batch. The "
        "same holds for the larger of two batches of one prompt. A share that is less than a tenth "
        "smaller counts too",
        ("decode_time",),
        figure_decode.decoding_gains_grow,
        item="figure_decode",
    ),
    Claim(
        "Decoding as a whole is not clearly faster",
        "Appendix F: no clear improvement in end-to-end decoding throughput, as kernel launches bound it",
        "no whole step is more than a tenth faster with ACP",
        ("decode_time",),
        figure_decode.decoding_not_faster,
        item="figure_decode",
    ),
)
