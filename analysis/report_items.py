"""What the report shows, in order: figures and tables, the runs they need, and the paper's claims."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from acp_repro.suite import Run, Suite, first_seeds

from . import criteria, style
from .criteria import Criterion


@dataclass(frozen=True)
class Item:
    """A figure or table of ``figures/SUITE``, and what stands in the paper beside it.

    ``quantities`` are the records that it is drawn from, of ``runs(suite)``; ``needs`` says in words
    which runs a suite must have. ``paper_model`` is (size, longest context in tokens) in the paper,
    None where the paper has no such item or scale does not matter.
    """

    name: str
    title: str
    quantities: tuple[str, ...] = ()
    runs: Callable[[Suite], list[Run]] = lambda suite: list(suite.runs)
    needs: str = ""
    paper_model: tuple[str, int] | None = None
    claims: tuple[Criterion, ...] = ()
    ours: bool = False  # a measurement that the paper does not have
    optional: bool = False  # shown where its file exists

    @property
    def label(self) -> str:
        """figureA1 -> "Figure A1", figure-kernel -> "Kernel"."""
        kind, number = re.fullmatch(r"(figure|table)(.+)", self.name).groups()
        return number[1:].capitalize() if number[0] == "-" else f"{kind.capitalize()} {number}"


def _acp(architecture: str) -> Callable[[Suite], list[Run]]:
    return lambda suite: first_seeds(suite.select(architecture=architecture, acp=True))


def _twins(architecture: str, largest: bool | None = None) -> Callable[[Suite], list[Run]]:
    """Runs with their exact twins: of the largest size, of the others, or of all (None)."""

    def runs(suite: Suite) -> list[Run]:
        twins = suite.with_all_seeds(suite.twins(architecture))
        top = max((run.size.non_embedding for run in twins), default=0)
        return [r for r in twins if largest is None or (r.size.non_embedding == top) == largest]

    return runs


def _heads_run(suite: Suite) -> list[Run]:
    return [suite.heads_run]


def _sweep_run(suite: Suite) -> list[Run]:
    return [suite.sweep_run]


def _place(item: str, quantity: str) -> str:
    """What ``paper_values.csv`` says of a quantity: its place and the words there."""
    table = style.paper_values()
    rows = table[(table["item"] == item) & (table["quantity"] == quantity) & table["size"].isna()]
    return rows["place"].iloc[0]


def _savings(item: str) -> tuple[Criterion, ...]:
    longer = "Abstract: longer context lengths yield greater computational savings"
    faster = "Section 4.2: longer training context lengths lead to greater throughput improvements"
    return (
        Criterion(
            "About 70 % of the FLOPs and memory accesses are pruned",
            _place(item, "pruned_ratio"),
            "every size prunes 60 to 80 % of its blocks at its longest context",
            ("pruned_ratio",),
            criteria.pruned_at_longest,
        ),
        Criterion(
            "Savings grow with context length",
            longer,
            "every size prunes more at every longer context",
            ("pruned_ratio",),
            criteria.savings_grow,
        ),
        Criterion(
            "Attention takes at least 50 % less time",
            _place(item, "attention_time_reduction"),
            "every size saves at least 50 % at every context length",
            ("attention_time",),
            criteria.time_saved,
        ),
        Criterion(
            "Training is never slower with ACP",
            _place(item, "throughput_gain"),
            "throughput with ACP is at least that without, at every size and context length",
            ("throughput",),
            criteria.throughput_not_lower,
        ),
        Criterion(
            "Throughput gains grow with context length",
            faster,
            "every size gains more at every longer context",
            ("throughput",),
            criteria.gains_grow,
        ),
    )


_NO_DAMAGE = Criterion(
    "The loss with ACP is the loss without",
    "Section 4.2: the curves almost match exactly, within the expected variance across runs",
    "mean held-out losses of twins differ by less than two seeds of one setting do; where one seed is "
    f"trained, by less than {criteria.LOSS_WITHIN_NATS} nats, the most between twins on Wikitext in Tables "
    "1 and 3",
    ("loss",),
    criteria.losses_match,
)
_LOCAL = "local: 95 % or more of what the grid of blocks allows is pruned; global: under 5 % of it"

ITEMS = (
    Item("figure1", "Attention with and without ACP", ("decay",), _heads_run),
    Item(
        "figure2",
        "What ACP saves, FoX (Pro)",
        ("pruned_ratio", "attention_time", "throughput"),
        _acp("pro"),
        "FoX (Pro) with ACP",
        ("760M", 16384),
        _savings("figure2"),
    ),
    Item(
        "figure3",
        "Loss with and without ACP, FoX (Pro)",
        ("loss", "loss_curve"),
        _twins("pro", True),
        "FoX (Pro) both with ACP and exact",
        ("760M", 16384),
        (_NO_DAMAGE,),
    ),
    Item(
        "figure4",
        "Savings of single heads",
        ("pruned_ratio",),
        _heads_run,
        "",
        ("760M", 4096),
        (
            Criterion(
                "Heads are either local or global",
                "Section 4.3: a clear bimodal pattern, most heads are local or global",
                f"there are local and global heads, together more than there are between ({_LOCAL})",
                ("pruned_ratio",),
                criteria.heads_bimodal,
            ),
            Criterion(
                "Most heads are local",
                "Section 4.3: a majority of the heads are local heads",
                f"more than half of the heads are local ({_LOCAL})",
                ("pruned_ratio",),
                criteria.most_heads_local,
            ),
        ),
    ),
    Item(
        "figure5",
        "Savings of single heads in each layer",
        ("pruned_ratio",),
        _heads_run,
        "",
        ("760M", 4096),
        (
            Criterion(
                "In the first two layers all heads are local",
                "Section 4.3, Figure 5",
                f"every head of the first two layers is local ({_LOCAL})",
                ("pruned_ratio",),
                criteria.first_layers_local,
            ),
        ),
    ),
    Item(
        "figure6",
        "Decay, boundary and attention of some heads",
        ("decay", "attention_weights"),
        _heads_run,
        "",
        ("760M", 4096),
        (
            Criterion(
                "No weight that matters is pruned",
                "Figure 6: entries of A larger than 0.1",
                "none of the attention weights over 0.1 lies left of the boundary",
                ("decay", "attention_weights"),
                criteria.large_weights_kept,
            ),
        ),
    ),
    Item(
        "figure7",
        "Savings against epsilon",
        ("epsilon_sweep",),
        _sweep_run,
        "",
        ("125M", 16384),
        (
            Criterion(
                "Savings fall with epsilon",
                "Section 4.3: with smaller epsilon the computational savings decrease",
                "no smaller epsilon prunes more, and the smallest prunes less than the largest",
                ("epsilon_sweep",),
                criteria.savings_fall_with_epsilon,
            ),
            Criterion(
                "A larger epsilon gains only marginally",
                "Section 4.3: marginal gain from $e^{-1}$ over the default $e^{-10}$",
                f"$e^{{-1}}$ prunes less than {criteria.MARGINAL_POINTS:g} percentage points more than "
                "$e^{-10}$",
                ("epsilon_sweep",),
                criteria.default_nearly_optimal,
            ),
            Criterion(
                "Pruning at $e^{-10}$ leaves the loss where it is",
                "Section 3: the impact of ACP on attention outputs is negligible",
                f"the loss at $e^{{-10}}$ is within {criteria.SAME_LOSS_NATS:g} nats of the loss at the "
                "smallest epsilon",
                ("epsilon_sweep",),
                criteria.loss_unmoved,
            ),
            Criterion(
                "The pruned mass is below every epsilon",
                "Appendix A: the pruned weights of a row sum to less than epsilon",
                "at every epsilon of the sweep the largest pruned mass of any row is below it",
                ("epsilon_sweep",),
                criteria.swept_mass_below_epsilon,
            ),
        ),
    ),
    Item(
        "figure8",
        "Loss with and without ACP, further sizes of FoX (Pro)",
        ("loss", "loss_curve"),
        _twins("pro", False),
        "a second size of FoX (Pro) both with ACP and exact",
        ("360M", 16384),
        (_NO_DAMAGE,),
    ),
    Item(
        "figure10",
        "What ACP saves, FoX (LLaMA)",
        ("pruned_ratio", "attention_time", "throughput"),
        _acp("llama"),
        "FoX (LLaMA) with ACP",
        ("760M", 16384),
        _savings("figure10"),
    ),
    Item(
        "figure11",
        "Loss with and without ACP, FoX (LLaMA)",
        ("loss", "loss_curve"),
        _twins("llama"),
        "FoX (LLaMA) both with ACP and exact",
        ("760M", 16384),
        (_NO_DAMAGE,),
    ),
    Item("table2", "Sizes"),
    Item(
        "table4",
        "Time spent on the boundary search",
        ("attention_time",),
        _acp("pro"),
        "FoX (Pro) with ACP",
        ("760M", 16384),
        (
            Criterion(
                "The boundary search is cheap",
                _place("table4", "boundary_search_share"),
                "at every size and context length it takes at most 6 % of the attention time",
                ("attention_time",),
                criteria.search_is_cheap,
            ),
        ),
    ),
    Item(
        "figureA1",
        "Pruned mass of every head against the bound",
        ("pruned_mass",),
        _sweep_run,
        ours=True,
        claims=(
            Criterion(
                "The bound of Appendix A holds",
                "Appendix A: the pruned weights of a row sum to less than epsilon",
                "in every head the largest pruned mass of any row, in float64, is below epsilon",
                ("pruned_mass",),
                criteria.mass_below_epsilon,
            ),
        ),
    ),
    Item(
        "figureA2",
        "What the size of blocks costs",
        ("block_size",),
        _sweep_run,
        ours=True,
        claims=(
            Criterion(
                "The block size hardly matters",
                "Appendix B: blocks are much smaller than the sequence, so the difference is negligible",
                f"savings with blocks of 32 and of 64 differ by less than "
                f"{criteria.MARGINAL_POINTS:g} percentage points",
                ("block_size",),
                criteria.block_size_negligible,
            ),
        ),
    ),
    Item(
        "figureA3",
        "Contexts longer than in training",
        ("long_context",),
        _sweep_run,
        ours=True,
        claims=(
            Criterion(
                "Savings keep growing past the training length",
                "Abstract: longer context lengths yield greater computational savings",
                "the same model prunes more at every longer evaluated length",
                ("long_context",),
                criteria.savings_grow_past_training,
            ),
        ),
    ),
    Item("figure-kernel", "Speed of the kernels", ours=True, optional=True),
    Item("figure9", "Needle in a haystack", optional=True),
    Item("table1", "LM-eval-harness, FoX (Pro)", optional=True),
    Item("table3", "LM-eval-harness, FoX (LLaMA)", optional=True),
)
