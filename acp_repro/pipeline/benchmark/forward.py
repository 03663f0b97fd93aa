"""The forward pass with ACP in inference, of our and the authors' kernels, at 86 shapes from FlagAttention.

Shapes, gates, scale and threshold are those of ``benchmark/test_forgetting_attention_benchmark.py`` in
flagos-ai/FlagAttention (commit 6913124). ``published_us`` in the table are its published times on an H100, if
available. The gates decay so fast that a block of queries keeps two or three blocks of keys.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from acp_repro.pipeline.paper import samples, with_columns

from ...attention import choose_implementation, forgetting_attention
from ...attention.reference import forgetting_attention as equations
from ...attention.reference import kept_entries
from ...common.command import progress_bar
from ...model.capture import AttentionInputs
from .baselines import available, find_official
from .timing import ORDER, in_columns, orders, wall_ms

SM_SCALE, THRESHOLD = 1.3, -10.0
_CALLS = 40  # consecutive calls, so that the other implementation affects neither clock rate nor queue
_WARM_UPS = 10
_CHECKED_HEADS = 2  # heads of the first sequence that are validated


def read_shapes() -> pd.DataFrame:
    """One row per shape: batch, queries, keys, heads, head_dim, dtype and published_us."""
    return pd.read_csv(Path(__file__).with_name("flag_attention.csv"))


def draw(row: Any, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (B, Tq, H, D), k and v (B, Tk, H, D), log_fgate (B, Tk, H) float32 = logsigmoid(U[0, 10])."""
    generator = torch.Generator(device).manual_seed(0)
    how = {"device": device, "dtype": getattr(torch, row.dtype), "generator": generator}
    q, k, v = (
        torch.randn(row.batch, length, row.heads, row.head_dim, **how)
        for length in (row.queries, row.keys, row.keys)
    )
    gates = torch.empty(row.batch, row.keys, row.heads, device=device).uniform_(0, 10, generator=generator)
    return q, k, v, torch.nn.functional.logsigmoid(gates)


def error(out: Tensor, inputs: tuple[Tensor, ...]) -> float:
    """Our error over its budget, twice that of eager PyTorch plus 1e-3, against float64 on equal blocks."""
    few = [x[:1, :, :_CHECKED_HEADS].transpose(1, 2) for x in inputs]
    threshold = torch.full((1, few[0].shape[1]), THRESHOLD, device=out.device)
    given = AttentionInputs(*few, threshold)
    kept = kept_entries(given.boundary(*given.grid()), few[0].shape[2], few[1].shape[2], *given.grid())
    truth, eager = (
        equations(*(x.to(dtype) for x in few[:3]), few[3], sm_scale=SM_SCALE, kept=kept)[0]
        for dtype in (torch.float64, out.dtype)
    )
    found = out[:1, :, :_CHECKED_HEADS].transpose(1, 2).double()
    allowed = 2 * (eager.double() - truth).norm() + 1e-3 * truth.norm()
    return float((found - truth).norm() / allowed)


@with_columns(
    "implementation",
    "dtype_of_inputs",
    "batch",
    "queries",
    "keys",
    "heads",
    "head_dim",
    "repeats",
    "order",
    *samples("forward_ms"),
    "error_budgets",
    "published_us",
)
@torch.inference_mode()
def time_forward(shapes: pd.DataFrame, device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields one record per shape and implementation; the time of a call includes host overhead.

    ``error_budgets`` is the error of this project's output, and ``published_us`` the time that FlagAttention
    published for an H100.
    """
    calls: dict[str, Callable[..., Tensor]] = {choose_implementation(device): forgetting_attention}
    missing = available("official", device)
    if isinstance(missing, str):
        print(f"official: {missing}")
    else:
        calls["official"] = find_official()
    for row in progress_bar(list(shapes.itertuples(index=False)), "shapes", unit="shape"):
        inputs = draw(row, device)
        attend = {
            name: functools.partial(call, *inputs, sm_scale=SM_SCALE, adaptive_threshold=THRESHOLD)
            for name, call in calls.items()
        }
        ours = next(iter(attend))
        budgets = error(attend[ours](), inputs)
        times: dict[str, list[float]] = {name: [] for name in attend}
        for order in orders(attend, repeats):
            for name in order:
                times[name] += _milliseconds(attend[name], device)
        for name, values in times.items():
            yield {
                "implementation": name,
                "dtype_of_inputs": row.dtype,
                **{key: getattr(row, key) for key in ("batch", "queries", "keys", "heads", "head_dim")},
                "repeats": len(values),
                "order": ORDER,
                **in_columns(forward=values),
                "error_budgets": budgets if name == ours else None,
                "published_us": None if pd.isna(row.published_us) else row.published_us,
            }


def _milliseconds(call: Callable[[], Tensor], device: torch.device) -> list[float]:
    if device.type != "cuda":
        return [wall_ms(call, device)]
    for _ in range(_WARM_UPS):
        call()
    torch.cuda.synchronize(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * _CALLS)]
    for begin, end in zip(events[::2], events[1::2], strict=True):
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True)]


def summary(records: list[dict[str, Any]]) -> str:
    """One line: the geometric mean of the authors' time over ours, and counts of wrong and slower shapes."""
    table = pd.DataFrame(records)
    shape = ["dtype_of_inputs", "batch", "queries", "keys", "heads", "head_dim"]
    times = table.set_index([*shape, "implementation"])["forward_ms"].unstack()
    wrong = int((table["error_budgets"] > 1).sum())
    words = f"{len(times)} shapes, {wrong} wrong"
    if "official" in times:
        ratio = times.pop("official") / times.squeeze(axis=1)
        words += (
            f"; the authors' kernel takes {geometric_mean(ratio):.3f} times as long (geometric mean), "
            f"and is faster at {int((ratio < 1).sum())} shapes"
        )
    return words
