"""From a suite's name to a figure or table on disk: what each item's module shares.

The function ``make(found) -> (Figure or Table, caption)`` of an item's module draws it. Only functions import
what draws, because commands import all modules to list what there is to draw.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from acp_repro.common import files
from acp_repro.pipeline import plan, state
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.paper import Item, Suite
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.run import Run
from acp_repro.pipeline.suite import load_suite

from . import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Found:
    """What an item of a suite is drawn from."""

    suite: Suite
    item: Item
    runs: tuple[Run, ...]
    records: Mapping[str, pd.DataFrame]


class Table(NamedTuple):
    """A table to read and the numbers behind it."""

    shown: pd.DataFrame  # text in every cell, as in ``NAME.md``
    values: pd.DataFrame  # tidy and unrounded, as in ``NAME.csv``


def find(suite_name: str, item_name: str) -> Found:
    """The records of an item."""
    suite = load_suite(suite_name)
    item = suite.paper.item(item_name)
    if not (runs := item.runs(suite)):
        raise SuiteError(plan.why_not(suite, item))
    records = {}
    for kind in map(suite.paper.quantity, item.quantities):
        about = item.runs_with(suite, kind)
        if kind.optional:
            about = [run for run in about if kind.path(suite.name, run.name).is_file()]
        if about:
            records[kind.name] = read_records(suite, kind.name, about)
    return Found(suite, item, tuple(runs), records)


def draw(suite_name: str, item_name: str) -> Path:
    """Draws an item of a suite and writes its files; returns the one that Make takes as the sign of it."""
    found = find(suite_name, item_name)
    _note_other_settings(found)
    style.use_style()
    drawn, caption = found.item.make(found)
    path = found.item.path(found.suite.name)
    return save_table(drawn, path, caption) if isinstance(drawn, Table) else save(drawn, path, caption)


def _note_other_settings(found: Found) -> None:
    """Says which records Make would measure again: a module that is run by itself draws what there is."""
    suite, records = found.suite, plan.records_of(found.suite, [found.item])
    there = [(run, q) for run, q in records if run and q.path(suite.name, run.name).is_file()]
    old = [(run, quantity) for run, quantity in there if not state.is_current(suite, run, quantity)]
    for words in plan.measure_commands(suite, old):
        print(
            f"note: records of other settings or weights are drawn; `{words}` measures them", file=sys.stderr
        )


def save(figure: Figure, path: Path, caption: str) -> Path:
    """Writes ``path``, a PNG, and beside it a PDF and the caption as Markdown; prints where."""
    from matplotlib import pyplot as plt

    # The PNG comes last: Make takes it as the sign that all three are there.
    files.write_text(path.with_suffix(".md"), caption.strip() + "\n")
    for suffix in ("pdf", "png"):
        undated = {"CreationDate": None} if suffix == "pdf" else None  # the same bytes if drawn again
        file = io.BytesIO()
        figure.savefig(file, format=suffix, bbox_inches="tight", pad_inches=0.03, metadata=undated)
        content = file.getvalue()
        files.write_bytes(path.with_suffix(f".{suffix}"), _small(content) if suffix == "png" else content)
    plt.close(figure)
    print(f"figure: {path.resolve()}")
    return path


def _small(png: bytes) -> bytes:
    """The picture in 256 colours, a third of the size. Some edges of letters change a little."""
    from PIL import Image

    small = io.BytesIO()
    picture = Image.open(io.BytesIO(png))
    colours = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    colours.save(small, "png", optimize=True, dpi=picture.info["dpi"])
    return small.getvalue()


def save_table(table: Table, path: Path, caption: str) -> Path:
    """Writes ``path``, Markdown of caption and table, and beside it CSV; prints the Markdown."""
    # The text comes last: Make takes it as the sign that both are there.
    files.write_text(path.with_suffix(".csv"), table.values.to_csv(index=False))
    header = list(table.shown.columns)
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(row)} |" for row in (header, rule, *table.shown.to_numpy().tolist())]
    text = "\n".join([caption.strip(), "", *lines, ""])
    files.write_text(path, text)
    print(f"table: {path.resolve()}")
    return path
