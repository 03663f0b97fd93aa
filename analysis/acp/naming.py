"""Names and descriptions of the models of ACP, and their distance from the paper's models."""

import math
import re
from collections.abc import Iterable, Sequence

import pandas as pd

from acp_repro.papers.acp.runs import FoXRun, FoXSuite
from acp_repro.papers.acp.schema import SizeConfig
from acp_repro.pipeline.paper import FigureSpec
from acp_repro.pipeline.suite_file import load_suite

from .. import style
from ..published import published

PUBLISHED = published("analysis.acp")
ARCHITECTURES = {"pro": "FoX (Pro)", "llama": "FoX (LLaMA)", "rope": "RoPE (Pro)"}
PAPER_SIZES = ("125M", "360M", "760M")
PAPER_CONTEXT = 4096  # the shortest context length of the paper
# Early in training the pruned ratio is high: 125M at 16k prunes 93 % after 20M tokens and 88 % after 100M.
# The paper excludes this stage (Section 4.1). A small model leaves the stage after one token per parameter.
START_TOKENS = 100_000_000
PAPER_RECIPE = 2**19, 256 * 2**20, 50_257  # batch tokens, warm-up tokens, vocabulary size
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}
# Colours of Okabe and Ito that no role of style.ROLES has.
COLOURS = ("#56B4E9", "#009E73", "#CC79A7", "#F0E442")


def heading(item: FigureSpec) -> str:
    """The bold number and title that begin a caption: "**Figure 4. Pruned ratios of attention heads.**"."""
    number = "" if item.extra else f"{item.label}. "
    return f"**{number}{item.title}.**"


def colour(size: str, index: int) -> str:
    """The colour of a model size: fixed for the paper's sizes, and by ``index`` for other sizes."""
    place = PAPER_SIZES.index(size) if size in PAPER_SIZES else index
    return COLOURS[place % len(COLOURS)]


def without_tokens(sizes: pd.Series) -> pd.Series:
    """Names of sizes without the suffix of their training tokens: "125M-0.5B" -> "125M"."""
    return sizes.str.replace(r"-[\d.]+B$", "", regex=True)


def run_cells(run: FoXRun) -> dict[str, str]:
    """The settings of a run, as columns of the report's table of runs."""
    tolerance = run.log_pruning_tolerance
    return {
        "architecture": ARCHITECTURES[run.architecture],
        "size": run.size_name,
        "context": style.length_label(run.context_length),
        "log epsilon": "exact" if tolerance is None else f"{tolerance:g}",
        "seed": str(run.seed),
    }


def in_words(sizes: Iterable[str]) -> str:
    """Names of sizes: "125M, 360M parameters", or "size tiny" for a name that is not a count."""
    sizes = list(sizes)
    listed = ", ".join(sizes)
    if all(re.fullmatch(r"\d+(\.\d+)?[kMB]?", size) for size in sizes):
        return f"{listed} parameters"
    return f"{'size' if len(sizes) == 1 else 'sizes'} {listed}"


def at_start(tokens: float, size: str) -> bool:
    """Whether a model is undertrained after ``tokens``; a model with fresh weights is not."""
    count = re.fullmatch(r"([\d.]+)([kMB]?)", size)
    weights = float(count[1]) * _UNITS[count[2]] if count else START_TOKENS
    return 0 < tokens < min(START_TOKENS, weights)


def start_mark(tokens: float, size: str) -> str:
    """The suffix of an undertrained model's name; empty for other models."""
    return f" ({style.count_label(tokens)} tokens, undertrained)" if at_start(tokens, size) else ""


def starting(records: pd.DataFrame) -> pd.Series:
    """Whether each row is of an undertrained model; False for formulas, which have no ``trained_tokens``."""
    if "trained_tokens" not in records:
        return pd.Series(False, records.index)
    pairs = zip(records["trained_tokens"].fillna(0), records["size"], strict=True)
    return pd.Series([at_start(*pair) for pair in pairs], records.index, dtype=bool)


def settled(records: pd.DataFrame) -> pd.DataFrame:
    """The rows that decide a verdict: the rows of models that are not undertrained, or else all rows."""
    start = starting(records)
    return records if start.all() else records[~start]


def past_start(runs: Iterable[FoXRun]) -> int:
    """The number of model shapes and context lengths among the runs that are not undertrained."""
    past = _past_start(runs)
    return len({(run.size.num_hidden_layers, run.size.hidden_size, run.context_length) for run in past})


def largest(runs: Iterable[FoXRun]) -> int:
    """The parameters of the largest model among the runs that are not undertrained."""
    return max((run.size.non_embedding for run in _past_start(runs)), default=0)


def distance(item: FigureSpec, runs: Iterable[FoXRun]) -> float:
    """The distance of the nearest run from the paper's size and context for an item, in powers of two."""
    if item.paper_model is None:
        return 0.0
    name, length = item.paper_model
    weights = paper_size(name).non_embedding
    return min(
        round(abs(math.log2(run.size.non_embedding / weights)), 1)
        + abs(math.log2(run.context_length / length))
        for run in runs
    )


def has_paper_recipe(runs: Iterable[FoXRun]) -> bool:
    """Whether the runs use the paper's learning rate, batch size, warm-up and vocabulary size."""
    return all(
        (run.training.batch_tokens, run.training.warmup_tokens, run.data.vocab_size) == PAPER_RECIPE
        and run.size.learning_rate == paper_size(_nearest_size(run)).learning_rate
        for run in runs
    )


def records_have_paper_recipe(records: pd.DataFrame) -> bool:
    """:func:`has_paper_recipe` for the runs of some records."""
    runs = records[["suite", "run"]].drop_duplicates().itertuples(index=False)
    return has_paper_recipe([load_suite(suite).run(run) for suite, run in runs])


def _nearest_size(run: FoXRun) -> str:
    return min(PAPER_SIZES, key=lambda name: abs(paper_size(name).non_embedding - run.size.non_embedding))


def _past_start(runs: Iterable[FoXRun]) -> list[FoXRun]:
    return [run for run in runs if not at_start(run.size.tokens, run.size_name)]


def span(table: pd.DataFrame, form: str = ".0f") -> str:
    """The range of ``percent``, separately for undertrained models: "77 to 86 % (undertrained: 91 %)"."""
    start = starting(table)
    past, early = (f"{style.span(table.loc[rows, 'percent'], form)} %" for rows in (~start, start))
    if start.all():
        return f"{early} (undertrained)"
    return f"{past} (undertrained: {early})" if start.any() else past


def run_name(record: pd.Series) -> str:
    """The name of a record's run, with :func:`start_mark`."""
    return record["run"] + start_mark(record["trained_tokens"], record["size"])


def marked(records: pd.DataFrame, column: str = "size") -> pd.Series:
    """The names in a column, with :func:`start_mark`."""
    if "trained_tokens" not in records:
        return records[column]
    pairs = zip(records["trained_tokens"].fillna(0), records["size"], strict=True)
    return records[column] + [start_mark(tokens, size) for tokens, size in pairs]


def vocabulary(records: pd.DataFrame) -> float:
    """The largest vocabulary size of the models of some records; infinite if their suites do not set it."""
    if "suite" not in records:
        return math.inf
    runs = records[["suite", "run"]].drop_duplicates().itertuples(index=False)
    sizes = [load_suite(suite).run(run).data.vocab_size for suite, run in runs]
    return max(size or math.inf for size in sizes)


def describe(suite: FoXSuite) -> str:
    """A noun phrase on the models of a suite."""
    sizes = in_words(dict.fromkeys(run.size_name for run in suite.runs))
    lengths = ", ".join(style.length_label(n) for n in sorted({run.context_length for run in suite.runs}))
    tokens = style.count_span(run.size.tokens for run in suite.runs)
    return f"{sizes}, contexts of {lengths} tokens, trained on {tokens} tokens each"


def shapes(runs: Sequence[FoXRun]) -> str:
    """The sizes and contexts of some runs in words, grouped by contexts."""
    lengths: dict[str, set[int]] = {}
    for run in runs:
        lengths.setdefault(run.size_name, set()).add(run.context_length)
    alike: dict[tuple[int, ...], list[str]] = {}
    for size, found in lengths.items():
        alike.setdefault(tuple(sorted(found)), []).append(size)
    return "; ".join(
        f"{', '.join(sizes)} at {', '.join(map(style.length_label, found))}" for found, sizes in alike.items()
    )


def at_paper_scale(item: FigureSpec, runs: Sequence[FoXRun]) -> bool:
    """Whether all runs have a size and context of the paper and a tenth of its training tokens, and one run
    has the size and context of the paper's item."""
    if item.paper_model is None:
        return False
    name, length = item.paper_model
    return any(_reaches(run, name, length) for run in runs) and all(
        _reaches(run, _nearest_size(run), PAPER_CONTEXT) for run in runs
    )


def _reaches(run: FoXRun, name: str, length: int) -> bool:
    """Whether a run reaches a size of the paper, a context length and a tenth of the paper's tokens."""
    paper = paper_size(name)
    enough = run.size.tokens >= 0.1 * paper.tokens
    return enough and run.size.non_embedding >= 0.9 * paper.non_embedding and run.context_length >= length


def paper_size(name: str) -> SizeConfig:
    """A row of the paper's Table 2."""
    settings = PUBLISHED.table.query("item == 'table2' and size == @name").set_index("quantity")["low"]
    return SizeConfig(
        int(settings["num_hidden_layers"]),
        int(settings["hidden_size"]),
        int(1e9 * settings["tokens"]),
        settings["learning_rate"],
    )
