"""Serialises the page: quantised statistics of a model's heads, deflated and base64-encoded, and the scripts.

``page/data.js`` decodes the numbers. Multi-byte numbers are stored as byte planes, the lowest bytes first,
because byte planes compress better.
"""

import base64
import html
import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import numpy as np

from acp_repro.attention.decay import cumulative_log_fgate

from .heads import Head, ModelHeads
from .palette import ROLES

GATE_STEPS = 64  # steps per unit of log(f / (1 - f)), so f is within 0.4 %; also steps per nat of q.k
CELL_FLOOR, RECEIVED_FLOOR = 1e-5, 1e-3
BINS_PER_OCTAVE = 4
# A query's strongest key and its keys of at least this weight are listed. If these are more than MOST_KEYS
# keys, about 1.4 bytes each, only every 2nd, 4th ... query has a list.
LEAST_WEIGHT = 0.01
MOST_KEYS = 2_500_000
D3 = "7.9.0"
_SCRIPTS = (
    f"d3.v{D3}.min.js",
    "data.js",
    "parts.js",
    "model.js",
    "head.js",
    "text.js",
    "rules.js",
    "compare.js",
    "main.js",
)


def choose_stride(models: Sequence[ModelHeads]) -> int:
    """The power of two such that the keys of every ``stride``-th query of all models fit the page."""
    count = sum(int(list_keys(head, 1).sum()) for model in models for head in model.heads)
    return 1 << max(0, math.ceil(math.log2(count / MOST_KEYS)))


def list_keys(head: Head, stride: int) -> np.ndarray:
    """(queries, K) bool: the listed keys of every ``stride``-th query."""
    keys, weights = (x[::stride].numpy() for x in (head.weights.keys, head.weights.weights))
    listed = (weights >= LEAST_WEIGHT) & (keys >= 0)
    listed[:, 0] = True
    return listed


def pack_model(model: ModelHeads, facts: Sequence[str], stride: int) -> tuple[dict[str, Any], list[str]]:
    """The data of one model: the metadata for the first view, and one base64 string for each head."""
    edges, own = distance_bins(model.length), model.own_log_pruning_tolerance
    with ThreadPoolExecutor() as threads:  # zlib releases the GIL
        packed = list(threads.map(lambda head: _pack_head(head, stride, edges, model.grid), model.heads))
    about = {
        "name": model.name,
        "facts": facts,
        "length": model.length,
        "cell": model.cell,
        "grid": model.grid,
        "ownTolerance": None if own is None else float(f"{own:.6g}"),  # as in the table
        "stride": stride,
        "leastWeight": LEAST_WEIGHT,
        "bins": edges.tolist(),
        "table": {column: _plain(model.table[column]) for column in model.table},
        "sizes": [sizes for sizes, _ in packed],
        "gateSteps": GATE_STEPS,
        "cellFloor": CELL_FLOOR,
        "receivedFloor": RECEIVED_FLOOR,
        "rules": model.rules,
        "thresholds": [head.threshold for head in model.heads],
    }
    return about, [text for _, text in packed]


def distance_bins(length: int) -> np.ndarray:
    """Edges of distance bins, (n,) int64: 0, 1, 2, ..., then :data:`BINS_PER_OCTAVE` bins per octave."""
    octaves = np.arange(0, math.log2(length) + 1 / BINS_PER_OCTAVE, 1 / BINS_PER_OCTAVE)
    edges = np.unique(np.concatenate([[0], np.round(2**octaves)]).astype(int))
    return np.append(edges[edges < length], length)


def pack_text(pieces: Sequence[str]) -> tuple[list[str], str]:
    """The distinct texts of ``pieces`` (the text of each token), and the index of each token in base64."""
    places: dict[str, int] = {}
    which = [places.setdefault(piece, len(places)) for piece in pieces]
    return list(places), encode([np.array(which, "<u4")])


def encode(arrays: Iterable[np.ndarray]) -> str:
    """Concatenates arrays of any shape as byte planes (lowest first), deflates them and encodes in base64."""
    contiguous = map(np.ascontiguousarray, arrays)
    raw = b"".join(one.view(np.uint8).reshape(-1, one.itemsize).T.tobytes() for one in contiguous)
    return base64.b64encode(zlib.compress(raw, 9)).decode()


def _pack_head(head: Head, stride: int, edges: np.ndarray, grid: tuple[int, int]) -> tuple[list[int], str]:
    w, length = head.weights, len(head.weights.received)
    log_fgate, logits = (
        w.received.new_empty(0) if x is None else x.double() for x in (head.log_fgate, head.logits)
    )
    gate = log_fgate - (-log_fgate.expm1()).clamp(min=1e-300).log()  # log(f / (1 - f))
    gate = (gate * GATE_STEPS).round().clamp(-32768, 32767) + 32768
    c = cumulative_log_fgate(log_fgate[None])[0].numpy()
    listed = list_keys(head, stride)
    keys, weights = (x[::stride].numpy() for x in (w.keys, w.weights))
    distance = np.arange(0, length, stride)[:, None] - keys
    lost = np.maximum.reduceat(w.pruned_mass.numpy(), np.arange(0, length, grid[0]))
    cells = w.cells.numpy()[np.tril_indices(len(w.cells))]
    arrays = [
        gate.numpy().astype("<u2"),
        # The boundary depends only on these values, so the page can compute the boundary of any epsilon.
        c[:: grid[0]].astype("<f8"),
        c[grid[1] - 1 :: grid[1]].astype("<f8"),
        np.diff(w.first_kept.numpy(), prepend=0).astype("<i4"),
        w.boundary.numpy().astype("<u4"),
        lost.astype("<f4"),
        listed.sum(1).astype("<u1"),
        distance[listed].astype("<u4"),
        np.round(255 * np.sqrt(weights[listed])).clip(0, 255).astype("<u1"),
        logarithmic(cells, CELL_FLOOR, 1.0),
        np.add.reduceat(w.by_distance.numpy(), edges[:-1]).astype("<f4"),
        logarithmic(w.received.numpy(), RECEIVED_FLOOR, length),
        np.round(GATE_STEPS * logits.numpy()).clip(-32768, 32767).astype("<i2"),
    ]
    return [len(array) for array in arrays], encode(arrays)


def logarithmic(values: np.ndarray, least: float, most: float) -> np.ndarray:
    """``values`` as uint8 on a logarithmic scale: 0 below ``least``, 1 at ``least``, 255 at ``most``."""
    share = np.log(np.maximum(values, least) / least) / math.log(most / least)
    return np.where(values < least, 0, 1 + np.round(254 * share.clip(0, 1))).astype("<u1")


def _plain(column) -> list:
    """Numbers with six significant digits; missing values become null."""
    values = column.tolist()
    return [
        float(f"{v:.6g}") if isinstance(v, float) and math.isfinite(v) else None if v != v else v
        for v in values
    ]


def render(title: str, about: dict[str, Any], blobs: dict[str, str]) -> str:
    """The HTML of the page, with metadata ``about`` and base64 strings ``blobs`` by element id."""
    folder = resources.files("acp_repro.explorer") / "page"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    def script(content: str, attributes: str = "") -> str:
        return f"<script{attributes}>{content}</script>"

    told = json.dumps(about, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    data = [script(told, ' type="application/json" id="about"')]
    data += [script(blob, f' type="text/plain" id="{name}"') for name, blob in blobs.items()]
    scripts = [
        f"<!-- D3, licence:\n{read('d3.LICENSE')}-->",
        *(script(f"\n{read(name)}") for name in _SCRIPTS),
    ]
    colours = "".join(f"--{role}:{colour};" for role, colour in ROLES.items())
    parts = {"title": html.escape(title), "style": f":root{{{colours}}}\n{read('style.css')}", "d3": D3}
    parts |= {"data": "\n".join(data), "scripts": "\n".join(scripts)}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], read("page.html"))
