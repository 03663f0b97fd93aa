"""Benchmark of attention kernels on random inputs: validated against float64 first, then timed.

A pruned pass is compared with a lower bound: the time of the fastest causal attention without gates, cuDNN's
or FlashAttention-4's, times the fraction of blocks that are kept. A pruned kernel would reach this bound if
it processed each block as fast as that kernel.
"""

import functools
import gc
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acp_repro.pipeline.paper import samples, with_columns

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

# The number of local heads.
GATES = {
    "mixed": lambda heads: round(heads * 2 / 3),
    "local": lambda heads: heads,
    "global": lambda heads: 0,
    "one-global": lambda heads: heads - 1,
}
PAPER = "paper_ratio"  # as many local heads as prune PAPER_SHARE, at every length and number of heads
PAPER_SHARE = 0.67  # within the paper's 65 to 70 %
_LOCAL, _GLOBAL = -0.2, -1e-4
_CHECKED_ROWS = 64
# Eager attention allocates about six score matrices at once.
_EAGER_LIMIT_BYTES = 20e9


class Problem(NamedTuple):
    q: Tensor  # (B, H, T, D), rows of norm sqrt(D), as after QK-norm
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
        """The boundaries (B, H, M) int32, by the running sum and boundary search that precede our kernels."""
        return self._given(method).search()

    def pruned_ratio(self, method: str) -> float:
        """The pruned ratio of our kernels on this device."""
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
    """The mean log gate (H,) of each head, local heads first. With :data:`PAPER` the number of local heads
    depends on the shape of attention, and one intermediate head compensates for the rounding to whole
    heads."""
    mean = torch.full((heads,), _GLOBAL, **options)
    if gates != PAPER:
        mean[: GATES[gates](heads)] = _LOCAL
        return mean
    delta, edge = float(threshold_of(length, head_dim)), 192  # blocks of 128 x 64 keep 192 more keys
    of_local = max(0.0, 1 - (delta / _LOCAL + edge) / length) ** 2
    whole, rest = divmod(PAPER_SHARE * heads, of_local) if of_local else (heads, 0.0)
    local = min(heads, int(whole))  # short contexts may not reach PAPER_SHARE
    mean[:local] = _LOCAL
    mean[local : local + 1] = delta / (length * (1 - math.sqrt(rest)) - edge)
    return mean


def make_problem(
    length: int, heads: int, head_dim: int, gates: str, tokens: int, device: torch.device, dtype: torch.dtype
) -> Problem:
    """A problem of ``max(1, tokens // length)`` sequences with exponentially distributed log gates."""
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
    """The threshold for rows of norm sqrt(D), with a margin for rounding to the dtype."""
    return pruning_threshold(math.sqrt(head_dim) * (1 + 2**-6), length)


class Error(NamedTuple):
    relative: float  # ||x - truth|| / ||truth||
    budgets: float  # ||x - truth|| / (2 ||eager PyTorch - truth|| + 1e-3 ||truth||)


def errors(call: Attend, problem: Problem, threshold: Tensor | str | None, gated: bool) -> dict[str, Error]:
    """The errors of the output and each gradient relative to the equations in float64, on the first sequence.
    Only its last rows have an upstream gradient, so that the dense equations fit into memory."""
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
    """(why a baseline is wrong and not timed, or None; the relative error of its gate gradient).

    The error of the gate gradient is only recorded, because kernels that omit the row sums of dS deviate by a
    few percent.
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


@with_columns(
    "implementation",
    "method",
    "gates",
    "length_tokens",
    "heads",
    "head_dim",
    "measured_tokens",
    "repeats",
    "pruned_ratio",
    *samples("forward_ms"),
    *samples("forward_backward_ms"),
    *samples("search_ms"),
    "nominal_forward_tflop",
    "nominal_forward_backward_tflop",
    "gate_gradient_error",
    *samples("forward_host_ms"),
    *samples("forward_backward_host_ms"),
    "order",
)
def time_baselines(problem: Problem, gates: str, calls: Mapping[str, Attend], repeats: int):
    """Yields one record, or one line of text with the reason for its absence, for each method of each
    baseline.

    The calls of all methods and baselines are interleaved: forward, forward + backward (including the
    boundary search), and the search alone, then the passes by the host's clock. A method that fails at any
    point has no record, and its memory is freed. The nominal FLOPs count the whole causal grid.
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
        """Calls ``work()``, unless the method has failed before."""
        if key in failed:
            return
        try:
            work()
        except Exception as error:  # after any error of a baseline, the others are still timed
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
        # On a CPU, host and device time are equal.
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
    """Frees the memory of a failed call: its error references tensors, and the allocator caches memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
