"""What the ACP paper says of its figures and tables, and the words of the criteria that check it."""

from __future__ import annotations

from acp_repro.chain.paper import Claim

# Half of the largest difference on Wikitext between paired runs in Tables 1 and 3, log(31.64 / 31.05) a word,
# which is fewer than two tokens.
LOSS_WITHIN_NATS = 0.009
PRUNED_PERCENT = (60.0, 80.0)  # what "around 70 %" is taken to mean
MARGINAL_POINTS = 5.0  # a difference of savings that counts as marginal or negligible
TASKS_P_VALUE = 0.05  # family-wise, of differences between paired runs on the downstream tasks
SAME_LOSS_NATS = 0.001  # of one model at two epsilons
SPARSE_PERCENT = 1.0  # of the causal entries; fewer than that over 0.1 count as "very sparse"
SETTLED_PERCENT = 5.0  # a change of training's speed that counts as none
SHARE_POINTS = 2.0  # what "roughly" is taken to mean of attention's share of all FLOPs
FOUND_RECALL = 0.2  # under this a model finds nothing that could be damaged
RECALL_POINTS = 10.0  # a loss of recall that an interval must rule out to show that there is no damage
LAYERS_EFFECT = 0.3  # Cohen's w, a medium effect: layers that are less apart are alike
LEARNT_RECALL = 0.8  # of a model that was trained to find

_LOCAL = "local: 95 % or more of what the grid of blocks allows is pruned; global: under 5 % of it"
_APPENDIX_A = "Appendix A: the pruned weights of a row sum to less than epsilon"
_LONGER = "Abstract: longer context lengths yield greater computational savings"

SAVINGS = (
    Claim(
        "About 70 % of the FLOPs and memory accesses are pruned",
        "=pruned_ratio",
        "every size prunes {:g} to {:g} % of its blocks at its longest context".format(*PRUNED_PERCENT),
        ("pruned_ratio",),
        "pruned_at_longest",
    ),
    Claim(
        "Savings grow with context length",
        _LONGER,
        "every size prunes more at every longer context",
        ("pruned_ratio",),
        "savings_grow",
    ),
    Claim(
        "Attention takes 50 % to 70 % less time",
        "=attention_time_reduction",
        "every size saves 50 to 70 % at every context length",
        ("attention_time",),
        "time_saved",
    ),
    Claim(
        "Training throughput rises by 10 % to 40 %",
        "=throughput_gain",
        "every size gains 10 to 40 % at every context length",
        ("throughput",),
        "throughput_gained",
    ),
    Claim(
        "Throughput gains grow with context length",
        "Section 4.2: longer training context lengths lead to greater throughput improvements",
        "every size gains more at every longer context",
        ("throughput",),
        "gains_grow",
    ),
)
NO_DAMAGE = (
    Claim(
        "ACP does not change the loss",
        "Section 4.2: the curves almost match exactly, within the expected variance across runs",
        "two one-sided tests at 5 %, with the pair of trainings as the unit, show that the mean difference "
        f"of held-out losses is under {LOSS_WITHIN_NATS} nats a token: half of what the paper's own pairs "
        "differ by on Wikitext at most (Tables 1 and 3, in nats a word), as a word is fewer than two tokens; "
        "it fails where the opposite test shows more, and with one pair it cannot be told",
        ("loss",),
        "losses_match",
    ),
)
TASKS = (
    Claim(
        "ACP does not change downstream results",
        "Section 4.2: the downstream task performances of models with and without ACP are similar",
        "in every column two one-sided tests at 5 %, with the pair of trainings as the unit, show a mean "
        "difference smaller than the largest of the paper's own pairs in that column; columns of accuracy in "
        "which no exact model is better than guessing say nothing and are left out; it fails where the "
        "opposite test shows more in a column (Holm's correction for all columns), and with one pair it "
        "cannot be told",
        ("lm_eval_items",),
        "tasks_match",
    ),
)
RETRIEVAL = (
    Claim(
        "ACP does not damage retrieval",
        "Section 4.2: ACP also does not damage long-context retrieval performance",
        "where exact attention finds the needle at all (a mean recall of "
        f"{FOUND_RECALL:g} or more of its words), the 95 % interval of the mean difference, ACP − exact, "
        "over pairs of trainings (over haystacks where one model is evaluated both ways) reaches 0 at every "
        f"training length, and does not reach down to −{RECALL_POINTS:g} points; where it reaches both, or "
        "where there is one pair of trainings, it cannot be told",
        ("needle",),
        "retrieval_kept",
    ),
)
RETRIEVAL_TRAINED = (
    *RETRIEVAL,
    Claim(
        "The test can tell: exact attention finds the needle",
        "Section 4.2, Figure 3 (right): models that retrieve are compared",
        f"the exact run's mean recall at its training length is {LEARNT_RECALL:g} or more",
        ("needle",),
        "needle_learnt",
        control=True,
    ),
)
HEADS = (
    Claim(
        "Heads are either local or global",
        "Section 4.3: a clear bimodal pattern, most heads are local or global",
        f"there are local and global heads, together more than there are between ({_LOCAL})",
        ("pruned_ratio",),
        "heads_bimodal",
    ),
    Claim(
        "Most heads are local",
        "Section 4.3: a majority of the heads are local heads",
        f"more than half of the heads are local ({_LOCAL})",
        ("pruned_ratio",),
        "most_heads_local",
    ),
)
LAYERS = (
    Claim(
        "In the first two layers all heads are local",
        "Section 4.3, Figure 5",
        f"every head of the first two layers is local ({_LOCAL})",
        ("pruned_ratio",),
        "first_layers_local",
    ),
)
LARGE_WEIGHTS = (
    Claim(
        "No attention weight over 0.1 is pruned",
        "Figure 6: entries of A larger than 0.1",
        "none of the attention weights over 0.1 lies left of the boundary",
        ("decay", "attention_weights"),
        "large_weights_kept",
    ),
)
EPSILON = (
    Claim(
        "Savings fall with epsilon",
        "Section 4.3: with smaller epsilon the computational savings decrease",
        "no smaller epsilon prunes more, and the smallest prunes less than the largest",
        ("epsilon_sweep",),
        "savings_fall_with_epsilon",
    ),
    Claim(
        "A larger epsilon gains only marginally",
        "Section 4.3: marginal gain from $e^{-1}$ over the default $e^{-10}$",
        f"$e^{{-1}}$ prunes less than {MARGINAL_POINTS:g} percentage points more than $e^{{-10}}$",
        ("epsilon_sweep",),
        "default_nearly_optimal",
    ),
    Claim(
        "Pruning at $e^{-10}$ does not change the loss",
        "Section 3: the impact of ACP on attention outputs is negligible",
        f"the loss at $e^{{-10}}$ is within {SAME_LOSS_NATS:g} nats of the loss at the smallest epsilon",
        ("epsilon_sweep",),
        "loss_unmoved",
    ),
    Claim(
        "The pruned attention weight stays below every epsilon",
        _APPENDIX_A,
        "at every epsilon of the sweep the largest pruned mass of any row is below it",
        ("epsilon_sweep",),
        "swept_mass_below_epsilon",
    ),
)
SEARCH = (
    Claim(
        "The boundary search is cheap",
        "=boundary_search_share",
        "at every size and context length it takes 2 to 6 % of the attention time",
        ("attention_time",),
        "search_is_cheap",
    ),
)
BOUND = (
    Claim(
        "Every head keeps the bound of Appendix A",
        _APPENDIX_A,
        "in every head the largest pruned mass of any row, in float64, is below epsilon",
        ("pruned_mass",),
        "mass_below_epsilon",
    ),
)
BLOCKS = (
    Claim(
        "The block size hardly matters",
        "Appendix B: blocks are much smaller than the sequence, so the difference is negligible",
        f"savings with blocks of 32 and of 64 differ by less than {MARGINAL_POINTS:g} percentage points",
        ("block_size",),
        "block_size_negligible",
    ),
)
LONG_CONTEXT = (
    Claim(
        "Savings keep growing past the training length",
        _LONGER,
        "the same model prunes more at every longer evaluated length",
        ("long_context",),
        "savings_grow_past_training",
    ),
)
