"""Where the time of a prefill goes: one clock that counts for the innermost running part."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from acp_repro.model import FoXCache, FoXForCausalLM
from acp_repro.model.generation import prefill
from acp_repro.model.layer_cache import LayerCache

from .timing import orders

# In the order of the table. Attention includes its search and the running sum of the gates.
PARTS = (
    "attention",
    "cache: write, read back, evict",
    "projections",
    "token shift, head norms, gates",
    "MLP",
    "norms",
    "embedding, residual sums",
    "logits",
)
_ATTENTION, _CACHE, _PROJECTIONS, _AROUND, _MLP, _NORMS, _REST, _LOGITS = PARTS


class Marks:
    """When each part began, on the device's own clock."""

    def __init__(self, device: torch.device):
        self.gpu = device.type == "cuda"
        self.running = [_REST]
        self.marks: list[tuple[str, Any]] = []
        self.note()

    def note(self) -> None:
        """Marks that from here on the innermost part counts."""
        now: Any = time.perf_counter()
        if self.gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((self.running[-1], now))

    def begin(self, part: str) -> None:
        self.running.append(part)
        self.note()

    def end(self) -> None:
        self.running.pop()
        self.note()

    def watch(self, module: nn.Module, part: str) -> list:
        """Handles of hooks that count all of ``module`` for ``part``, except the parts inside it."""
        return [
            module.register_forward_pre_hook(lambda *_: self.begin(part)),
            module.register_forward_hook(lambda *_: self.end()),
        ]

    def around(self, function: Callable, part: str) -> Callable:
        def counted(*arguments):
            self.begin(part)
            out = function(*arguments)
            self.end()
            return out

        return counted

    def milliseconds(self) -> Counter[str]:
        """Milliseconds by part; the last mark ends the clock."""
        if self.gpu:
            torch.cuda.synchronize()
        found: Counter[str] = Counter()
        for (part, begin), (_, end) in itertools.pairwise(self.marks):
            found[part] += begin.elapsed_time(end) if self.gpu else 1e3 * (end - begin)
        return found


@torch.no_grad()
def prefill_parts(model: FoXForCausalLM, prompt: Tensor) -> Counter[str]:
    """Milliseconds of one prefill of ``prompt`` (B, T) int64 by part; their sum is the whole prefill."""
    cache = FoXCache(model.config.num_hidden_layers, max_length=prompt.shape[1])
    watched = [(model.lm_head, _LOGITS), (model.model.norm, _NORMS)]
    for block in model.model.layers:
        watched += [(block.attn, _AROUND), (block.attn.core, _ATTENTION), (block.mlp, _MLP)]
        watched += [(norm, _NORMS) for norm in (block.attn_norm, block.mlp_norm)]
        watched += [(x, _PROJECTIONS) for x in block.attn.modules() if isinstance(x, nn.Linear)]
    if prompt.is_cuda:
        torch.cuda.synchronize()
    marks = Marks(prompt.device)
    handles = [handle for module, part in watched for handle in marks.watch(module, part)]
    try:
        with contextlib.ExitStack() as stack:
            for holder, name in ((LayerCache, "attend"), (FoXCache, "join")):  # of every cache that is made
                counted = marks.around(getattr(holder, name), _CACHE)
                stack.enter_context(mock.patch.object(holder, name, counted))
            prefill(model, prompt, cache)
    finally:
        for handle in handles:
            handle.remove()
    marks.note()
    return marks.milliseconds()


def breakdown(model: FoXForCausalLM, prompt: Tensor, methods: dict[str, float | None]) -> str:
    """A table: milliseconds of each part, and its share, with each log epsilon of ``methods``."""
    found: dict[str, Counter[str]] = {method: Counter() for method in methods}
    turns = list(orders(methods, 2))
    for turn, order in enumerate([list(methods), *turns]):
        for method in order:
            model.set_log_pruning_tolerance(methods[method])
            one = prefill_parts(model, prompt)
            if turn:  # the first compiles
                found[method].update(one)
    lines = [f"{'prefill, ms':32}" + "".join(f"{method:>18}" for method in methods)]
    for part in (*PARTS, "all"):
        line = f"{part:32}"
        for times in found.values():
            total = times.total()
            own = total if part == "all" else times[part]
            line += f"{own / len(turns):10.2f} {100 * own / total:5.1f} %"
        lines.append(line)
    return "\n".join(lines)
