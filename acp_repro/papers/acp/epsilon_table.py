"""The result of an epsilon sweep for a person: an aligned table, and CSV where there is no run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from acp_repro.chain.command import aligned
from acp_repro.common import files

HEADER = (
    "log epsilon",
    "blocks pruned",
    "entries pruned",
    "loss (nats)",
    "largest pruned mass",
    "bound epsilon",
)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Records of ``epsilon_sweep`` as aligned text; the mass is ``-`` where nothing was pruned."""
    lines = [HEADER]
    for row in rows:
        value, mass = row["swept_log_pruning_tolerance"], row["largest_pruned_mass"]
        lines.append(
            (
                f"{value:g}",
                f"{100 * row['block_pruned_ratio']:.1f} %",
                f"{100 * row['token_pruned_ratio']:.1f} %",
                f"{row['loss_nats']:.5f}",
                "-" if mass is None or math.isnan(mass) else f"{mass:.1e}",
                f"{math.exp(value):.1e}",
            )
        )
    return "\n".join(aligned(lines))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], origin: Mapping[str, Any]) -> Path:
    """Writes ``rows``, each followed by the same columns of ``origin``; for checkpoints without a run."""
    names = [*rows[0], *origin]
    return files.write_csv(path, names, ([{**row, **origin}[name] for name in names] for row in rows))
