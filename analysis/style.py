"""How every figure looks, where it goes, and the paper's own numbers."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from acp_repro.records import RecordError
from acp_repro.suite import SuiteError

FIGURES = Path("figures")
COLUMN_INCHES = 3.4  # one column of a two-column page
PAGE_INCHES = 7.0

# Okabe and Ito's colours, told apart by colour-blind readers and in grey.
SIZES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
PAPER = "#9a9a9a"
ARCHITECTURES = {"pro": "FoX (Pro)", "llama": "FoX (LLaMA)"}
# Figures 1 and 6: darker is a stronger decay; the boundary stands out from it in colour and in grey.
# No decay is pale and not white, so that it differs from entries that do not exist.
DECAY_MAP = ListedColormap(matplotlib.colormaps["Blues_r"](np.linspace(0, 0.88, 256)))
BOUNDARY = "#E69F00"


def use_style() -> None:
    """Small type for print, no frame where it says nothing, fonts embedded as text."""
    sns.set_theme(context="paper", style="ticks", palette=SIZES)
    plt.rcParams.update(
        {
            "figure.dpi": 200,
            "savefig.dpi": 300,
            "font.size": 8,
            "axes.titlesize": 8.5,
            "axes.labelsize": 8,
            "xtick.labelsize": 7.5,
            "ytick.labelsize": 7.5,
            "legend.fontsize": 7.5,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.7,
            "pdf.fonttype": 42,
            "hatch.linewidth": 0.6,
        }
    )


@functools.cache
def paper_values() -> pd.DataFrame:
    """``paper_values.csv``: the numbers that the paper prints, each with its place."""
    return pd.read_csv(Path(__file__).with_name("paper_values.csv"))


def paper_range(item: str, quantity: str) -> tuple[float, float]:
    """(low, high) that the paper prints for a quantity of a figure or table as a whole."""
    table = paper_values()
    table = table[table["size"].isna()]
    row = table[(table["item"] == item) & (table["quantity"] == quantity)].iloc[0]
    return float(row["low"]), float(row["high"])


def length_label(tokens: int) -> str:
    """4096 -> "4k"."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def count_label(count: float) -> str:
    """409600 -> "410k", 2684354560 -> "2.7B", 2048 -> "2k": one decimal at most."""
    units = ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    unit, name = next((pair for pair in units if count >= pair[0]), units[-1])
    digits = f"{count / unit:.{0 if count >= 10 * unit else 1}f}"
    return digits.removesuffix(".0") + name


def token_axis(axis: Axis, tokens: int) -> None:
    """An axis of token positions, 0 to ``tokens``, with ticks at its quarters."""
    axis.axes.set(**{f"{axis.axis_name}lim": (0, tokens)})
    axis.set_major_locator(MultipleLocator(tokens / 4))
    axis.set_major_formatter(FuncFormatter(lambda x, _: length_label(int(x)) if x else "0"))


def provenance(*tables: pd.DataFrame) -> str:
    """One sentence on where the measured numbers of a figure come from."""

    def values(column: str) -> str:
        unique = {str(v) for t in tables for v in t[column].dropna().unique()}
        return ", ".join(sorted(unique)) or "not recorded"

    trained = sorted({int(v) for t in tables for v in t["trained_tokens"].unique()})
    tokens = " to ".join(f"{v:,}" for v in dict.fromkeys((trained[0], trained[-1])))
    return (
        f"Measured by suite {values('suite')} on {values('device')} ({values('dtype')}, torch "
        f"{values('torch_version')}, commit {values('commit')}); models trained on {tokens} tokens."
    )


def save(figure: Figure, suite: str, name: str, caption: str) -> Path:
    """Writes ``figures/SUITE/NAME.png``, ``.pdf`` and the caption as ``NAME.md``; says where."""
    folder = FIGURES / suite
    folder.mkdir(parents=True, exist_ok=True)
    # The PNG comes last: Make takes it as the sign that all three are there.
    (folder / f"{name}.md").write_text(caption.strip() + "\n")
    for suffix in ("pdf", "png"):
        path = folder / f"{name}.{suffix}"
        undated = {"CreationDate": None} if suffix == "pdf" else None  # the same bytes if drawn again
        figure.savefig(path, bbox_inches="tight", pad_inches=0.03, metadata=undated)
    plt.close(figure)
    print(f"figure: {path.resolve()}")
    return path


class Table(NamedTuple):
    """A table to read and the numbers behind it."""

    shown: pd.DataFrame  # text in every cell, as in ``NAME.md``
    values: pd.DataFrame  # tidy and unrounded, as in ``NAME.csv``


def save_table(table: Table, suite: str, name: str, caption: str) -> Path:
    """Writes ``figures/SUITE/NAME.csv``, and ``NAME.md`` with caption and table; prints the latter."""
    folder = FIGURES / suite
    folder.mkdir(parents=True, exist_ok=True)
    # The text comes last: Make takes it as the sign that both are there.
    table.values.to_csv(folder / f"{name}.csv", index=False)
    header = list(table.shown.columns)
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(row)} |" for row in (header, rule, *table.shown.to_numpy().tolist())]
    path = folder / f"{name}.md"
    path.write_text("\n".join([caption.strip(), "", *lines, ""]))
    print(path.read_text())
    print(f"table: {path.resolve()}")
    return path


def main(
    name: str,
    description: str,
    make: Callable[[str], tuple[Any, str]],
    save: Callable[[Any, str, str, str], Path] = save,
) -> None:
    """The command line of a figure or table module.

    Args:
        make: suite to (figure or table, caption).
        save: :func:`save` or :func:`save_table`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m analysis.{name}", description=description)
    parser.add_argument("--suite", default="cpu", help="whose records to draw (default: cpu)")
    suite = parser.parse_args().suite
    use_style()
    try:
        drawn, caption = make(suite)
    except (RecordError, SuiteError) as error:
        sys.exit(f"error: {error}")
    save(drawn, suite, name, caption)
