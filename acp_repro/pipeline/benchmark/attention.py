"""The attention kernels alone, on random tokens: checked against float64 first, then timed.

A pruned pass is compared with a limit. The limit is the time of the fastest causal attention without gates,
cuDNN's or FlashAttention-4's, times the share of blocks that are left. A pruned kernel would reach it if its
blocks were as fast as those of that kernel.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention import choose_implementation, pruning_threshold
from ...attention.boundary import attention_flops, causal_blocks
from ...attention.reference import forgetting_attention as equations
from ...attention.threshold import logit_bound_from_norms
from ...common.command import progress_bar
from ...common.errors import is_out_of_memory
from ...model.capture import AttentionInputs
from .baselines import BASELINES, Attend
from .timing import ORDER, Clock, device_ms, host_ms, in_columns, interleaved, orders

Key = tuple[str, str]  # a baseline and one of its methods

# How many heads are local.
GATES = {
    "mixed": lambda heads: round(heads * 2 / 3),
    "local": lambda heads: heads,
    "global": lambda heads: 0,
    "one-global": lambda heads: heads - 1,
}
PAPER = "paper_ratio"  # local heads until PAPER_SHARE is pruned at every length and number of heads
PAPER_SHARE = 0.67  # of the 65 to 70 %
_LOCAL, _GLOBAL = -0.2, -1e-4
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
        """The threshold for a baseline's call."""
        return {"exact": None, "no gates": None, "acp auto": "auto"}.get(method, self.threshold)

    def search(self, method: str) -> Tensor:
        """(B, H, M) int32: the running sum and boundary search that ours does before its kernels."""
        return self._given(method).search()

    def pruned_ratio(self, method: str) -> float:
        """The share of blocks that ours prunes on this device."""
        if not method.startswith("acp"):
            return 0.0
        return self._given(method).count().pruned_ratio.mean().item()

    def _given(self, method: str) -> AttentionInputs:
        threshold = self.threshold
        if method == "acp auto":
            bound = logit_bound_from_norms(self.q, self.k, self.q.shape[-1] ** -0.5)
            threshold = pruning_threshold(bound, self.q.shape[2])
        return AttentionInputs(*self.inputs, threshold)


def mean_gates(gates: str, heads: int, length: int = 0, head_dim: int = 64, **options: Any) -> Tensor:
    """(H,) float, the mean log gate of each head, local heads first. With :data:`PAPER` the number of local
    heads depends on the attention's shape, and one head between local and global makes up what whole heads
    miss."""
    mean = torch.full((heads,), _GLOBAL, **options)
    if gates != PAPER:
        mean[: GATES[gates](heads)] = _LOCAL
        return mean
    delta, edge = float(threshold_of(length, head_dim)), 192  # blocks of 128 x 64 keep so many keys more
    of_local = max(0.0, 1 - (delta / _LOCAL + edge) / length) ** 2
    whole, rest = divmod(PAPER_SHARE * heads, of_local) if of_local else (heads, 0.0)
    local = min(heads, int(whole))  # short contexts may not reach the share
    mean[:local] = _LOCAL
    mean[local : local + 1] = delta / (length * (1 - math.sqrt(rest)) - edge)
    return mean


def make_problem(
    length: int, heads: int, head_dim: int, gates: str, tokens: int, device: torch.device, dtype: torch.dtype
) -> Problem:
    """``max(1, tokens // length)`` sequences (B, H, T, D); log gates are exponentially distributed."""
    generator = torch.Generator(device).manual_seed(0)
    batch = max(1, tokens // length)

    def draw() -> Tensor:
        shape = (batch, length, heads, head_dim)
        return torch.randn(shape, generator=generator, device=device)

    q, k = (math.sqrt(head_dim) * torch.nn.functional.normalize(draw(), dim=-1) for _ in range(2))
    q, k, v, dout = (x.to(dtype).transpose(1, 2) for x in (q, k, draw(), draw()))
    mean = mean_gates(gates, heads, length, head_dim, device=device)
    steps = torch.empty(batch, heads, length, device=device).exponential_(generator=generator)
    threshold = threshold_of(length, head_dim).to(device)
    return Problem(q, k, v, steps * mean[:, None], dout, threshold.expand(batch, heads).contiguous())


def threshold_of(length: int, head_dim: int) -> Tensor:
    """The threshold for rows of norm sqrt(D), with a margin for the rounding of norms to the dtype."""
    return pruning_threshold(math.sqrt(head_dim) * (1 + 2**-6), length)


class Error(NamedTuple):
    relative: float  # ||x - truth|| / ||truth||
    budgets: float  # the same over twice the error of eager PyTorch and 1e-3


def errors(call: Attend, problem: Problem, threshold: Tensor | str | None, gated: bool) -> dict[str, Error]:
    """Error of the output and each gradient against the equations in float64, on the first sequence, with an
    upstream gradient at its last rows only, so that the dense equations fit into memory."""
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


def check_baseline(
    call: Attend, problem: Problem, threshold: Tensor | str | None, gated: bool
) -> tuple[str | None, float | None]:
    """Why a baseline is wrong, and so is not timed, or None; and the error of its gate gradient.

    That error is only recorded: kernels that leave out the row sums of dS are off by some percent there.
    """
    found = errors(call, problem, threshold, gated)
    gate = found.pop("dlog_fgate", Error(0.0, 0.0)).relative if gated else None
    if gate is not None and not gate < 0.5:
        return f"wrong: its gate gradient is off by {100 * gate:.0f} %", gate
    wrong = [f"{name} {100 * e.relative:.2g} %" for name, e in found.items() if not e.budgets <= 1]
    return f"wrong: {', '.join(wrong)} off" if wrong else None, gate


def shorten_error(error: Exception) -> str:
    """The error in one line."""
    what = "out of memory" if is_out_of_memory(error) else "does not run"
    return f"{what}: {(str(error).splitlines() or [type(error).__name__])[0][:100]}"


def time_baselines(problem: Problem, gates: str, calls: Mapping[str, Attend], repeats: int):
    """Yields one record, or one line of text on why there is none, for each method of each baseline.

    All methods of all baselines take turns: forward, forward + backward (the boundary search inside), and the
    search alone; then by the host's clock. A method that fails, at any point, has no record, and its memory
    is freed.
    """
    batch, heads, length, head_dim = problem.q.shape
    device, gpu = problem.q.device, problem.q.device.type == "cuda"
    entries = causal_blocks(length, length, 1, 1) * batch * heads
    forward = attention_flops(entries, 1, 1, head_dim, backward=False) / 1e12
    backward = attention_flops(entries, 1, 1, head_dim, backward=True) / 1e12
    keys = [(name, method) for name in calls for method in BASELINES[name].methods]
    gate_errors: dict[Key, float | None] = {}
    failed: dict[Key, str] = {}

    def attempt(key: Key, work: Callable[[], Any]) -> None:
        """``work()``, unless the method has failed before."""
        if key in failed:
            return
        try:
            work()
        except Exception as error:  # any error of a baseline; the others are timed nevertheless
            failed[key] = shorten_error(error)
        if key in failed:
            give_memory_back()

    def check(key: Key) -> None:
        name, method = key
        threshold, gated = problem.threshold_of(method), method != "no gates"
        wrong, gate_errors[key] = check_baseline(calls[name], problem, threshold, gated)
        if wrong:
            failed[key] = wrong

    for key in progress_bar(keys, "checks", unit="method", leave=False):
        if key[0] == "eager" and 6 * entries * 8 > _EAGER_LIMIT_BYTES:
            failed[key] = "not timed, its scores do not fit into memory"
        attempt(key, functools.partial(check, key))

    def timed(part: Callable[[Key], Any], clock: Clock, keys: list[Key]) -> dict[Key, list[float]]:
        parts = {k: functools.partial(attempt, k, functools.partial(part, k)) for k in keys}
        return interleaved(parts, device, repeats, clock, warm_ups=4 if gpu else 1, title="times")

    keys = [key for key in keys if key not in failed]
    leaves = [x.detach().requires_grad_() for x in problem.inputs]

    def attend(key: Key) -> Tensor:
        return calls[key[0]](*leaves, problem.threshold_of(key[1]))

    def both(key: Key) -> None:
        inputs = leaves if key[1] != "no gates" else leaves[:3]
        torch.autograd.grad(attend(key), inputs, problem.dout)

    searching = [key for key in keys if key[0] == "ours" and key[1].startswith("acp")]
    columns = {
        "forward": timed(attend, device_ms, keys),
        "forward_backward": timed(both, device_ms, keys),
        "search": timed(lambda key: problem.search(key[1]), device_ms, searching),
        # A CPU is both host and device.
        "forward_host": timed(torch.no_grad()(attend), host_ms, keys) if gpu else {},
        "forward_backward_host": timed(both, host_ms, keys) if gpu else {},
    }
    turns = len(list(orders(keys, repeats)))
    yield from (f"{name}, {method}: {reason}" for (name, method), reason in failed.items())
    for key in (key for key in keys if key not in failed):
        name, method = key
        yield {
            "implementation": name if name != "ours" else choose_implementation(device),
            "method": method,
            "gates": gates,
            "length_tokens": length,
            "heads": heads,
            "head_dim": head_dim,
            "measured_tokens": batch * length,
            "repeats": turns,
            "order": ORDER,
            "pruned_ratio": problem.pruned_ratio(method),
            "nominal_forward_tflop": forward,
            "nominal_forward_backward_tflop": forward + backward,
            "gate_gradient_error": gate_errors[key],
            **in_columns(**{name: times.get(key, []) for name, times in columns.items()}),
        }


def give_memory_back() -> None:
    """Frees the memory of a failed call: its error held its tensors, and the allocator holds their memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
