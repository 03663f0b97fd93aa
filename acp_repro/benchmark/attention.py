"""The attention kernels alone, on random tokens: checked against float64 first, then timed.

The limit that a pruned pass is compared with is cuDNN's causal attention, which has no gates, times the
share of blocks that are left: what pruning would cost if it were as fast a block as the fastest kernel.
"""

from __future__ import annotations

import gc
import math
import time
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention import choose_implementation, pruning_grid, pruning_threshold
from ..attention.boundary import attention_flops, causal_blocks, count_blocks
from ..attention.op import running_sum_and_boundary
from ..attention.reference import forgetting_attention as equations
from ..attention.threshold import logit_bound_from_norms
from .rivals import RIVALS, Call
from .timing import elapsed_ms

# Mean log gate of each kind of head, and how many of them are local.
LOCAL_NATS, GLOBAL_NATS = -0.2, -1e-4
GATES = {
    "bimodal": lambda heads: round(heads * 2 / 3),
    "local": lambda heads: heads,
    "global": lambda heads: 0,
    "one-global": lambda heads: heads - 1,
}
_CHECKED_ROWS = 64
# Eager attention holds about six matrices of scores at once.
_EAGER_LIMIT_BYTES = 20e9


class Problem(NamedTuple):
    q: Tensor  # (B, H, T, D), rows of norm sqrt(D), as QK-norm gives them
    k: Tensor
    v: Tensor
    log_fgate: Tensor  # (B, H, T) float32
    dout: Tensor
    threshold: Tensor  # (B, H): U = sqrt(D), log epsilon = -10

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.log_fgate

    def threshold_of(self, method: str) -> Tensor | str | None:
        """What a rival is given as its threshold."""
        return {"exact": None, "no gates": None, "acp auto": "auto"}.get(method, self.threshold)

    def search(self, method: str) -> Tensor:
        """(B, H, M): all that ours does before its kernels, as it does it on this device."""
        name, length, threshold = (choose_implementation(self.q.device), self.q.shape[2], self.threshold)
        if method == "acp auto":
            bound = logit_bound_from_norms(self.q, self.k, self.q.shape[-1] ** -0.5)
            threshold = pruning_threshold(bound, length)
        grid = pruning_grid(name, self.q.shape[-1], self.q.dtype)
        return running_sum_and_boundary(name, self.log_fgate, threshold, length, *grid)[1]

    def pruned_ratio(self, method: str) -> float:
        """The share of blocks that ours prunes on this device."""
        if not method.startswith("acp"):
            return 0.0
        name = choose_implementation(self.q.device)
        grid = pruning_grid(name, self.q.shape[-1], self.q.dtype)
        length = self.q.shape[2]
        boundary = self.search(method)
        return count_blocks(boundary, length, length, *grid).pruned_ratio.mean().item()


def make_problem(
    length: int, heads: int, head_dim: int, gates: str, tokens: int, device: torch.device, dtype: torch.dtype
) -> Problem:
    """``max(1, tokens // length)`` sequences; log gates are exponentially distributed."""
    generator = torch.Generator(device).manual_seed(0)
    batch = max(1, tokens // length)

    def draw() -> Tensor:
        shape = (batch, length, heads, head_dim)
        return torch.randn(shape, generator=generator, device=device)

    q, k = (math.sqrt(head_dim) * torch.nn.functional.normalize(draw(), dim=-1) for _ in range(2))
    q, k, v, dout = (x.to(dtype).transpose(1, 2) for x in (q, k, draw(), draw()))
    mean = torch.full((heads,), GLOBAL_NATS, device=device)
    mean[: GATES[gates](heads)] = LOCAL_NATS
    steps = torch.empty(batch, heads, length, device=device).exponential_(generator=generator)
    # A margin for the rounding of norms to the dtype.
    threshold = pruning_threshold(math.sqrt(head_dim) * (1 + 2**-6), length).to(device)
    return Problem(q, k, v, steps * mean[:, None], dout, threshold.expand(batch, heads).contiguous())


class Error(NamedTuple):
    relative: float  # ||x - truth|| / ||truth||
    budgets: float  # the same over twice the error of eager PyTorch and 1e-3


def errors(call: Call, problem: Problem, threshold: Tensor | str | None, gated: bool) -> dict[str, Error]:
    """Error of the output and each gradient against the equations in float64.

    On the first sequence, with an upstream gradient at its last rows only: then everything follows from
    these rows, at the full length, and the dense equations fit into memory.
    """
    first = [x[:1] for x in problem.inputs]
    if not gated:
        first[3] = torch.zeros_like(first[3])
    rows = min(_CHECKED_ROWS, problem.q.shape[2])
    dout = torch.zeros_like(problem.dout[:1])
    dout[:, :, -rows:] = problem.dout[:1, :, -rows:]
    leaves = [x.detach().clone().requires_grad_() for x in first]
    out = call(*leaves, threshold[:1] if isinstance(threshold, Tensor) else threshold)
    grads = torch.autograd.grad(out, leaves if gated else leaves[:3], dout)

    def dense(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in first]
        if dtype != torch.float64:
            inputs[3] = first[3].detach().clone().requires_grad_()
        expected, _ = equations(inputs[0][:, :, -rows:], *inputs[1:], sm_scale=out.shape[-1] ** -0.5)
        return [expected, *torch.autograd.grad(expected, inputs, dout[:, :, -rows:].to(dtype))]

    names = ("out", "dq", "dk", "dv", "dlog_fgate")
    truth, eager = dense(torch.float64), dense(problem.q.dtype)
    result = {}
    for name, a, t, e in zip(names, [out[:, :, -rows:], *grads], truth, eager, strict=False):
        error, norm = (a.double() - t).norm().item(), t.norm().item()
        result[name] = Error(error / norm, error / (2 * (e.double() - t).norm().item() + 1e-3 * norm))
    return result


def check(
    call: Call, problem: Problem, threshold: Tensor | str | None, gated: bool
) -> tuple[str | None, float | None]:
    """Why a rival is not timed (it is wrong, or does not run) or None, and its gate gradient's error.

    The gate gradient is judged by its own record: kernels that leave out the row sums of dS are off by
    some percent there (docs/lab-notebook.md), which says something of their use and not of their speed.
    """
    try:
        found = errors(call, problem, threshold, gated)
    except Exception as error:  # a rival's own, whatever it is: the others are timed all the same
        return why_not(error), None
    gate = found.pop("dlog_fgate", Error(0.0, 0.0)).relative if gated else None
    if gate is not None and not gate < 0.5:
        return f"wrong: its gate gradient is off by {100 * gate:.0f} %", gate
    wrong = [f"{name} {100 * e.relative:.2g} %" for name, e in found.items() if not e.budgets <= 1]
    return f"wrong: {', '.join(wrong)} off" if wrong else None, gate


def why_not(error: Exception) -> str:
    """One line."""
    what = "out of memory" if isinstance(error, torch.OutOfMemoryError) else "does not run"
    return f"{what}: {(str(error).splitlines() or [type(error).__name__])[0][:100]}"


def time_call(
    call: Call, problem: Problem, threshold: Tensor | str | None, gated: bool, repeats: int
) -> tuple[float, float]:
    """Median milliseconds of forward, and of forward + backward; the boundary search inside."""
    leaves = [x.detach().requires_grad_() for x in problem.inputs]

    def forward() -> Tensor:
        return call(*leaves, threshold)

    def both() -> None:
        torch.autograd.grad(forward(), leaves if gated else leaves[:3], problem.dout)

    return tuple(_median_ms(one, repeats, problem.q.device) for one in (forward, both))


def _median_ms(call, repeats: int, device: torch.device) -> float:
    for _ in range(1 if device.type == "cpu" else 4):
        call()
    if device.type != "cuda":
        return median(elapsed_ms(call, device)[0] for _ in range(repeats))
    # All repeats are queued behind a pause of some 50 ms, so that the GPU never waits for the host.
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(100_000_000)
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return median(start.elapsed_time(end) for start, end in events)


def host_ms(
    call: Call, problem: Problem, threshold: Tensor | str | None, gated: bool, repeats: int
) -> tuple[float | None, float | None]:
    """Median milliseconds until the host has a call behind it, while the GPU is still at work: of forward
    without gradients, and of forward + backward. None on a CPU, which is host and device in one."""
    if problem.q.device.type != "cuda":
        return None, None
    leaves = [x.detach().requires_grad_() for x in problem.inputs]

    def forward() -> None:
        with torch.no_grad():
            call(*leaves, threshold)

    def both() -> None:
        torch.autograd.grad(call(*leaves, threshold), leaves if gated else leaves[:3], problem.dout)

    def once(one) -> float:
        torch.cuda.synchronize(problem.q.device)  # so that no full queue of launches holds the host up
        begin = time.perf_counter()
        one()
        return (time.perf_counter() - begin) * 1e3

    return tuple(median([once(one) for _ in range(4 + repeats)][4:]) for one in (forward, both))


def measure(problem: Problem, gates: str, name: str, call: Call, repeats: int):
    """Yields one record, or one line of text on why there is none, for each method of a rival.

    A method that fails, at whatever point, has no record, and what it held is given back.
    """
    batch, heads, length, _ = problem.q.shape
    entries = causal_blocks(length, length, 1, 1) * batch * heads
    for method in RIVALS[name].methods:
        if name == "eager" and 6 * entries * 8 > _EAGER_LIMIT_BYTES:
            yield f"{name}, {method}: not timed, its scores do not fit into memory"
            continue
        try:
            found = _measure_method(problem, gates, name, method, call, repeats, entries)
        except Exception as error:  # what passed the check may still not fit at the whole batch
            found = why_not(error)
        if isinstance(found, str):
            give_memory_back()
            found = f"{name}, {method}: {found}"
        yield found


def give_memory_back() -> None:
    """Of what failed: its error held its tensors, and the allocator holds their memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _measure_method(
    problem: Problem, gates: str, name: str, method: str, call: Call, repeats: int, entries: int
) -> dict[str, Any] | str:
    """A record, or why there is none."""
    batch, heads, length, head_dim = problem.q.shape
    forward = attention_flops(entries, 1, 1, head_dim, backward=False) / 1e12
    backward = attention_flops(entries, 1, 1, head_dim, backward=True) / 1e12
    threshold = problem.threshold_of(method)
    gated = method != "no gates"
    wrong, gate_error = check(call, problem, threshold, gated)
    if wrong:
        return wrong
    times = time_call(call, problem, threshold, gated, repeats)
    host = host_ms(call, problem, threshold, gated, repeats)
    search = None
    if name == "ours" and method.startswith("acp"):
        search = _median_ms(lambda: problem.search(method), repeats, problem.q.device)
    return {
        "implementation": name if name != "ours" else choose_implementation(problem.q.device),
        "method": method,
        "gates": gates,
        "length_tokens": length,
        "heads": heads,
        "head_dim": head_dim,
        "measured_tokens": batch * length,
        "repeats": repeats,
        "pruned_ratio": problem.pruned_ratio(method),
        "forward_ms": times[0],
        "forward_backward_ms": times[1],
        "search_ms": search,
        "nominal_forward_tflop": forward,
        "nominal_forward_backward_tflop": forward + backward,
        "gate_gradient_error": gate_error,
        "forward_host_ms": host[0],
        "forward_backward_host_ms": host[1],
    }
