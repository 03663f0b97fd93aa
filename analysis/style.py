"""How every figure looks, where it goes, and the paper's own numbers."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from acp_repro.records import RecordError

FIGURES = Path("figures")
COLUMN_INCHES = 3.4  # one column of a two-column page
PAGE_INCHES = 7.0

# Okabe and Ito's colours, told apart by colour-blind readers and in grey.
SIZES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
PAPER = "#9a9a9a"


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
    """(low, high) that the paper prints for a quantity of a figure or table."""
    table = paper_values()
    row = table[(table["item"] == item) & (table["quantity"] == quantity)].iloc[0]
    return float(row["low"]), float(row["high"])


def length_label(tokens: int) -> str:
    """4096 -> "4k"."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


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
        figure.savefig(path, bbox_inches="tight", pad_inches=0.03)
    plt.close(figure)
    print(f"figure: {path.resolve()}")
    return path


def main(name: str, description: str, make: Callable[[str], tuple[Figure, str]]) -> None:
    """The command line of a figure module: ``make(suite)`` gives the figure and its caption."""
    parser = argparse.ArgumentParser(prog=f"python -m analysis.{name}", description=description)
    parser.add_argument("--suite", default="cpu", help="whose records to draw (default: cpu)")
    suite = parser.parse_args().suite
    use_style()
    try:
        figure, caption = make(suite)
    except RecordError as error:
        sys.exit(f"error: {error}")
    save(figure, suite, name, caption)
