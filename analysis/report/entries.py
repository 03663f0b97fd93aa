"""What the report holds; gathered in ``gather``, shown by ``page``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from acp_repro.pipeline.paper import Claim, Item, Page, Suite

from ..verdict import Status


@dataclass(frozen=True)
class Judgement:
    """A claim, judged.

    Attributes:
        paper: the paper's words and where they stand.
        ours: our numbers, or why there are none.
    """

    claim: Claim
    paper: str
    status: Status
    ours: str


@dataclass(frozen=True)
class Entry:
    """A section of the page.

    Attributes:
        image: None if not drawn.
        text: caption, and the table of a table, in Markdown; None if not made.
        scale: ours beside the paper's, in words; empty where it does not matter.
        absent: why the suite cannot have it; empty where it can.
        records: the files that it is drawn from.
        unmeasured: "RUN: quantity, quantity" of what is still to be measured.
        steps: the commands that make it, one by one.
    """

    item: Item
    image: Path | None
    text: str | None
    judgements: tuple[Judgement, ...]
    scale: str
    absent: str
    records: tuple[Path, ...]
    unmeasured: tuple[str, ...]
    steps: tuple[str, ...]

    @property
    def made(self) -> bool:
        return (self.text if self.item.is_table else self.image) is not None

    @property
    def shown(self) -> bool:
        """Whether it has a section of its own; what the suite cannot have is a line of a list."""
        return self.made or not self.absent


@dataclass(frozen=True)
class Report:
    """All that the page shows.

    Attributes:
        models: the suite's models in half a sentence; may be empty.
        caveat: what a verdict on them is worth, in a sentence; may be empty.
        facts: (name, values) of where the records come from.
        runs: one row per run, as text.
        entries: of the items that are shown.
        left_out: of further items that could be drawn.
        pages: made of weights, that lie beside the report.
    """

    suite: Suite
    models: str
    caveat: str
    facts: tuple[tuple[str, str], ...]
    runs: pd.DataFrame
    entries: tuple[Entry, ...]
    left_out: tuple[Item, ...]
    pages: tuple[Page, ...]
