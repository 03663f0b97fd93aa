"""Draws the figures and tables of a suite: code that the modules of all items share.

The function ``make(context)`` of an item's module returns (figure or :class:`Table`, caption). The figure is
None if a plot would be empty; the report then shows the caption only. Drawing libraries are imported inside
functions, because commands import all modules to list the items.
"""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from acp_repro.common import files
from acp_repro.pipeline import freshness, planner
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.paper import FigureSpec, Suite
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.run import Run
from acp_repro.pipeline.suite_file import load_suite

from . import style
from .tables import markdown_table

# For annotations, here and in the modules of the figures as ``drawing.Figure``.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection, QuadMesh  # noqa: F401
    from matplotlib.figure import Figure

LETTERS = "abcdefgh"  # the panel letters


@dataclass(frozen=True)
class DrawContext:
    """The suite, runs and records from which an item is drawn."""

    suite: Suite
    item: FigureSpec
    runs: tuple[Run, ...]
    records: Mapping[str, pd.DataFrame]


class Table(NamedTuple):
    """A table for readers, and its numbers."""

    shown: pd.DataFrame  # text cells, written to ``NAME.md``
    values: pd.DataFrame  # tidy, unrounded numbers, written to ``NAME.csv``


def find(suite_name: str, item_name: str) -> DrawContext:
    """The context of an item, with its records."""
    suite = load_suite(suite_name)
    item = suite.paper.item(item_name)
    if not (runs := item.runs(suite)):
        raise SuiteError(planner.why_not(suite, item))
    records = {}
    for kind in map(suite.paper.metric, item.metrics):
        about = item.runs_with(suite, kind)
        if kind.optional:
            about = [run for run in about if kind.path(suite.name, run.name).is_file()]
        if about:
            records[kind.name] = read_records(suite, kind.name, about)
    return DrawContext(suite, item, tuple(runs), records)


def draw(suite_name: str, item_name: str) -> Path:
    """Draws an item of a suite and writes its files; returns the path of the picture, table or caption."""
    context = find(suite_name, item_name)
    _note_other_settings(context)
    style.use_style()
    drawn, caption, *versions = context.item.make(context)
    if context.records:
        versions.append(style.provenance(*context.records.values()))
        caption = f"{caption.strip()}\n\n{' '.join(filter(None, versions))}"
    path = context.item.path(context.suite.name)
    return save_table(drawn, path, caption) if isinstance(drawn, Table) else save(drawn, path, caption)


def _note_other_settings(context: DrawContext) -> None:
    """Prints which records Make would measure again; a module that is run directly draws the present ones."""
    suite, records = context.suite, planner.records_of(context.suite, [context.item])
    there = [(run, q) for run, q in records if run and q.path(suite.name, run.name).is_file()]
    old = [(run, metric) for run, metric in there if not freshness.is_current(suite, run, metric)]
    for words in planner.measure_commands(suite, old):
        print(
            f"note: records of other settings or weights are drawn; `{words}` measures them", file=sys.stderr
        )


def save(figure: Figure | None, path: Path, caption: str, formats: Sequence[str] = ("pdf", "png")) -> Path:
    """Writes ``path``, a PNG, a PDF of the same name, and the caption as Markdown; prints the path. Without a
    figure, writes the caption and deletes an earlier picture."""
    from matplotlib import pyplot as plt

    if caption:
        files.write_text(path.with_suffix(".md"), caption.strip() + "\n")
    if figure is None:
        for suffix in formats:
            path.with_suffix(f".{suffix}").unlink(missing_ok=True)
        return path.with_suffix(".md")
    _letter_panels(figure)
    _wrap_titles(figure)
    for suffix in formats:
        undated = {"CreationDate": None} if suffix == "pdf" else None  # the same bytes if drawn again
        file = io.BytesIO()
        figure.savefig(file, format=suffix, bbox_inches="tight", pad_inches=0.03, metadata=undated)
        content = file.getvalue()
        files.write_bytes(path.with_suffix(f".{suffix}"), _small(content) if suffix == "png" else content)
    plt.close(figure)
    print(f"figure: {path.resolve()}")
    return path


def forest(
    values: Mapping[str, float | Sequence[float]], axis: str, paper_range: Sequence[float] = ()
) -> Figure:
    """A forest plot: one row per value, with its interval if it is (mean, low, high); the paper's range is a
    band."""
    style.use_style()
    figure, ax = panels(height=0.5 + 0.16 * len(values), width=5.0)
    for row, value in enumerate(values.values()):
        mean, *ends = value if isinstance(value, Sequence) else (value,)
        ax.plot(ends or [mean], [row] * (len(ends) or 1), color=style.SIZES[0])
        ax.plot([mean], [row], "o", ms=3, color=style.SIZES[0])
    ax.set(yticks=range(len(values)), yticklabels=values, xlabel=axis)
    ax.invert_yaxis()
    ax.axvline(0, color="0.2", lw=0.8)
    if len(paper_range):
        ax.axvspan(*paper_range, color=style.PAPER, alpha=0.35, lw=0, zorder=0, label="the paper's range")
        ax.legend(loc="lower right")
    return figure


def _letter_panels(figure: Figure) -> None:
    """Prefixes the titles with (a), (b), (c), if several panels have a title."""
    titled = [ax for ax in figure.axes if ax.get_title(loc="left")]
    if len(titled) > 1 and len(titled) <= len(LETTERS):
        for ax, letter in zip(titled, LETTERS, strict=False):
            ax.set_title(f"({letter}) {ax.get_title(loc='left')}")


def _wrap_titles(figure: Figure) -> None:
    """Wraps each panel's title at the width of the panel."""
    figure.draw_without_rendering()  # lays out the panels, which sets their widths
    for ax in figure.axes:
        inches = ax.get_window_extent().width / figure.dpi
        words, letters = ax.get_title(loc="left").replace(" %", "\xa0%"), inches * 72 / (0.51 * style.POINTS)
        ax.set_title(textwrap.fill(words, max(20, int(letters))))


def panels(
    columns: int = 1, height: float = 2.4, width: float | None = None, rows: int = 1, **options: Any
) -> tuple:
    """A figure with panels side by side and a light grid: one panel has the width of a column, several have
    the width of the page."""
    from matplotlib import pyplot as plt

    width = width or (style.PAGE_INCHES if columns > 1 else style.COLUMN_INCHES)
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **options)
    for ax in figure.axes:
        ax.grid(visible=True)
    return figure, axes


def legend(figure: Figure, ncols: int = 4, **options: Any) -> None:
    """Adds one legend below all panels, without duplicate labels, in as many columns as fit."""
    found = {
        label: handle
        for ax in figure.axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    for columns in range(min(ncols, len(found)), 0, -1):
        options |= {"loc": "outside lower center", "ncols": columns}
        drawn = figure.legend(found.values(), found.keys(), **options)
        figure.draw_without_rendering()
        if columns == 1 or drawn.get_window_extent().width <= figure.bbox.width:
            return
        drawn.remove()


def note(ax: Axes, words: str, at: tuple[float, float], offset: tuple[float, float], **options: Any) -> None:
    """Annotates a point with ``words`` at an offset in points: centred above or below, or beside it."""
    x, y = offset
    side = {"ha": "left" if x > 0 else "right" if x < 0 else "center"}
    side |= {"va": "bottom" if y > 0 else "top" if y < 0 else "center"}
    ax.annotate(words, at, offset, textcoords="offset points", **(side | options))


def powers_of_two(ax: Axes, values: Sequence[int], name: Callable[[int], str] = str) -> None:
    """Sets a base-2 logarithmic x axis with ticks at the values only."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, map(name, values))
    ax.minorticks_off()


def strip(count: int, width: float) -> np.ndarray:
    """Deterministic offsets that spread points over a strip, alternating between both sides."""
    return width * ((np.arange(count) * 0.618034) % 1 - 0.5)


def _small(png: bytes) -> bytes:
    """The picture in 256 colours, which reduces the file to a third; edges of letters change slightly."""
    from PIL import Image

    small = io.BytesIO()
    picture = Image.open(io.BytesIO(png))
    colours = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    colours.save(small, "png", optimize=True, dpi=picture.info["dpi"])
    return small.getvalue()


def save_table(table: Table, path: Path, caption: str) -> Path:
    """Writes caption and table as Markdown to ``path``, and the numbers as CSV; prints the Markdown."""
    files.write_text(path.with_suffix(".csv"), table.values.to_csv(index=False))
    shown = markdown_table(table.shown.columns, table.shown.to_numpy().tolist(), right=True)
    text = f"{caption.strip()}\n\n{shown}\n"
    files.write_text(path, text)
    print(f"table: {path.resolve()}")
    return path
