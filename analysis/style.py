"""The style of all figures, and the format of their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from acp_repro.explorer.palette import BOUNDARY, ROLES  # noqa: F401, figures read them from here

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.colors import ListedColormap

COLUMN_INCHES = 3.4  # one column of a two-column page
PAGE_INCHES = 7.0
POINTS = 7.5  # the size of all text
TYPE = (
    *("font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"),
    *("legend.fontsize", "legend.title_fontsize", "figure.titlesize", "figure.labelsize"),
)

# The palette of Okabe and Ito, which colour-blind readers can distinguish, also in greyscale.
SIZES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
PAPER = "#9a9a9a"
# The tokens of an epoch of data/books with a vocabulary of 16,384, by suite. The training loss rises between
# epochs: an epoch ends with the late parts of long books, which are easy, and the next epoch begins with the
# first part of every book.
EPOCH_TOKENS = dict.fromkeys(
    ("h100", "h100-pairs", "h200-ablations", "h200-llama", "h200-long", "h200-sizes"), 89_000_000
)


def decay_map() -> ListedColormap:
    """The colour map of the decay in Figures 1 and 6: darker is a stronger decay. No decay is pale blue, to
    distinguish it from white, the colour of entries above the diagonal."""
    import matplotlib
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps["Blues_r"](np.linspace(0.25, 0.88, 256)))


def use_style() -> None:
    """Sets one text size, a light grid, no redundant frame, and fonts embedded as text."""
    import matplotlib
    import matplotlib.pyplot as plt
    import seaborn as sns

    matplotlib.rcdefaults()  # a user's matplotlibrc would change the figures
    matplotlib.use("Agg")
    sns.set_theme(context="paper", style="ticks", palette=SIZES)
    plt.rcParams.update(
        {
            "figure.dpi": 200,
            "savefig.dpi": 300,
            "legend.frameon": False,
            "legend.handlelength": 3.0,
            "legend.columnspacing": 1.3,
            "axes.axisbelow": True,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.7,
            "grid.color": "0.92",
            "grid.linewidth": 0.6,
            "lines.linewidth": 1.3,
            "lines.markersize": 4,
            "pdf.fonttype": 42,
            "hatch.linewidth": 0.6,
        }
        | dict.fromkeys(TYPE, POINTS)
    )


def length_label(tokens: int) -> str:
    """4096 -> "4k"."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def count_label(count: float) -> str:
    """409600 -> "410k", 2684354560 -> "2.7B", 2048 -> "2k": one decimal at most."""
    units = ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    unit, name = next((pair for pair in units if count >= pair[0]), units[-1])
    digits = f"{count / unit:.{0 if count >= 10 * unit else 1}f}"
    return digits.removesuffix(".0") + name


def span(values: pd.Series, form: str = ".0f") -> str:
    """ "77 to 93", or "89" if both ends round to the same text."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (values.min(), values.max())))


def count_span(counts: Iterable[float]) -> str:
    """ "20M to 100M", or "20M" if both ends round to the same text."""
    counts = list(counts)
    return " to ".join(dict.fromkeys(map(count_label, (min(counts), max(counts)))))


def epochs(tokens: float, suite: str) -> str:
    """ ", 4.5 epochs" for training runs of at least two epochs; empty for others."""
    epoch = EPOCH_TOKENS.get(suite, float("inf"))
    return f", {tokens / epoch:.1f} epochs" if tokens >= 2 * epoch else ""


def token_axis(axis: Axis, tokens: int) -> None:
    """Sets an axis of token positions from 0 to ``tokens`` with ticks at the quarters."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    axis.axes.set(**{f"{axis.axis_name}lim": (0, tokens)})
    axis.set_major_locator(MultipleLocator(tokens / 4))
    axis.set_major_formatter(FuncFormatter(lambda x, _: length_label(int(x)) if x else "0"))


def provenance(*tables: pd.DataFrame) -> str:
    """Returns a sentence on the origin of a figure's measured numbers.

    A second sentence names the commits whose times were measured in a fixed order; their ``order`` is empty.
    """

    def values(column: str) -> str:
        return ", ".join(sorted({str(v) for t in tables for v in t[column].dropna().unique()}))

    suite = f" by suite {values('suite')}" if values("suite") else ""  # empty for records without a suite
    counts = sorted({int(v) for t in tables for v in t["trained_tokens"].dropna().unique()})
    trained = [v for v in counts if v]
    tokens = " to ".join(f"{v:,}" for v in dict.fromkeys((*trained[:1], *trained[-1:])))
    seen = f"{tokens} tokens{epochs(max(counts, default=0), values('suite'))}"
    weights = [f"models trained on {seen}"] * bool(trained) + ["results without training"] * (0 in counts)
    models = "; " + " and ".join(weights) if weights else ""
    fixed = [t.loc[t["order"].isna(), "commit"].dropna() for t in tables if "order" in t]
    commits = ", ".join(sorted({commit for each in fixed for commit in each}))
    in_order = "were taken in one fixed order, which has shifted ratios by up to 4 %."
    order = f" Times of commit {commits} {in_order}" if commits else ""
    return (
        f"Measured{suite} on {values('device')} ({values('dtype')}, torch {values('torch_version')}, "
        f"commit {values('commit') or 'not recorded'}){models}.{order}"
    )
