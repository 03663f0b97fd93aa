"""Times a decoding step, of attention and of a whole model, and one read of the required data."""

import functools
import itertools
import math
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from acp_repro.attention import PagedKVCache, choose_implementation, forgetting_attention_with_kvcache
from acp_repro.attention.reference import decode as decode_reference
from acp_repro.model import FoXCache, FoXConfig, FoXForCausalLM
from acp_repro.model.decode_step import DecodeStep
from acp_repro.model.generation import prefill
from acp_repro.pipeline.paper import samples, with_columns

from .attention import mean_gates, threshold_of
from .baselines import Attend, available, decode_officially, official_model
from .timing import ORDER, Call, Clock, device_ms, in_columns, interleaved, orders, peak_memory

_BLOCK = 64
# The bytes of the cache are given for each head, and as if one block table served all heads of a layer.
COLUMNS = (
    "scope",
    "implementation",
    "method",
    "gates",
    "batch",
    "length_tokens",
    "layers",
    "heads",
    "head_dim",
    "repeats",
    *samples("step_ms"),
    "read_ms",
    *samples("prefill_ms"),
    "kept_bytes",
    "layer_kept_bytes",
    "allocated_bytes",
    "peak_bytes",
    "output_error",
    "order",
)
# Larger than the L2 cache of any GPU: written between two calls, so that keys are read from memory.
_FLUSH_BYTES = 256 << 20


class DecodeProblem(NamedTuple):
    q: Tensor  # (B, H, 1, D), rows of norm sqrt(D), as after QK-norm
    cache: PagedKVCache  # with the boundary of a long sequence
    threshold: Tensor  # (B, H): U = sqrt(D), log epsilon = -10
    log_fgate: Tensor  # (B, H, T) float32

    def kept_bytes(self, method: str) -> int:
        """The number of bytes of keys and values that a step reads."""
        blocks = -(-self.cache.seqlens[:, None] // _BLOCK) - self.cache.start_block * (method == "acp")
        return int(blocks.sum()) * _BLOCK * 2 * self.q.shape[-1] * self.q.element_size()

    def step(self, method: str) -> Tensor:
        """The output (B, H, 1, D) of a step in the steady state, in which the boundary does not advance."""
        start = self.cache.start_block if method == "acp" else self.cache.start_block * 0
        return forgetting_attention_with_kvcache(
            self.q,
            self.cache,
            start,
            head_first=True,
            adaptive_threshold=self.threshold if method == "acp" else None,
        )

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, T, D), for functions without a block table."""
        length = int(self.cache.seqlens[0])
        blocks = self.cache.block_table.long()
        return tuple(x[blocks].flatten(2, 3)[:, :, :length] for x in (self.cache.k, self.cache.v))


def make_decode_problem(
    batch: int, length: int, heads: int, head_dim: int, gates: str, device: torch.device, dtype: torch.dtype
) -> DecodeProblem:
    """Random tokens with blocks in random order and exponentially distributed log gates."""
    generator = torch.Generator(device).manual_seed(0)

    def rows(*shape: int) -> Tensor:
        x = torch.randn(*shape, head_dim, generator=generator, device=device, dtype=dtype)
        return (x / x.float().norm(dim=-1, keepdim=True) * math.sqrt(head_dim)).to(dtype)

    options = {"block_size": _BLOCK, "dtype": dtype, "device": device}
    cache = PagedKVCache.allocate(batch, heads, length, head_dim, **options)
    for k, v in zip(cache.k.split(1 << 14), cache.v.split(1 << 14), strict=True):
        k.copy_(rows(*k.shape[:2]))  # in parts: the float32 norms of all keys would not fit into memory
        v.normal_(generator=generator)
    order = torch.randperm(len(cache.k), generator=generator, device=device)
    cache.block_table.copy_(order.view_as(cache.block_table))
    steps = torch.empty(batch, heads, length, device=device).exponential_(generator=generator)
    log_fgate = steps * mean_gates(gates, heads, device=device)[:, None]
    padded = torch.nn.functional.pad(log_fgate.double().cumsum(-1), (0, cache.capacity - length))
    cache.c[order, 0] = padded.view(-1, _BLOCK)
    cache.seqlens.fill_(length)
    threshold = threshold_of(length, head_dim).to(device).expand(batch, heads).contiguous()
    cache.advance(cache.start_block, threshold, 1)
    return DecodeProblem(rows(batch, heads, 1), cache, threshold, log_fgate)


def output_error(problem: DecodeProblem, method: str) -> float:
    """``||out - truth|| / ||truth||`` on the first sequence, where truth is the equations in float64."""
    k, v, c, table, seqlens, start = problem.cache
    blocks = table[0].flatten().long()
    own = torch.arange(len(blocks), dtype=torch.int32, device=blocks.device).view(table[:1].shape)
    row = PagedKVCache(k[blocks].double(), v[blocks].double(), c[blocks], own, seqlens[:1])
    start = start[:1] * (method == "acp")
    truth = decode_reference(problem.q[:1].double(), row, start, None, problem.q.shape[-1] ** -0.5)
    return ((problem.step(method)[:1].double() - truth).norm() / truth.norm()).item()


def _graphed(call: Call, device: torch.device) -> Call:
    """``call`` as a CUDA graph, as in a decoding model; on a CPU ``call`` itself."""
    if device.type != "cuda":
        return call
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(_held: Call = call) -> None:  # the reference keeps the tensors that the graph reads alive
        graph.replay()

    return replay


def _clock(device: torch.device) -> Clock:
    """The device's clock; on a GPU it flushes the L2 cache before each call."""
    if device.type != "cuda":
        return device_ms
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def flushed_ms(call: Call, device: torch.device) -> float:
        flush.zero_()
        return device_ms(call, device)

    return flushed_ms


def _reads(count: int, device: torch.device) -> dict[str, Call]:
    """Two reductions that only read ``count`` bytes once; the faster one is the lower bound."""
    numbers = torch.zeros(max(count // 4, 1), dtype=torch.int32, device=device)
    reductions = {"amax": numbers.amax, "sum": numbers.view(torch.float32).sum}
    return {name: _graphed(reduce, device) for name, reduce in reductions.items()}


@with_columns(*COLUMNS)
def measure_attention(
    problem: DecodeProblem, gates: str, repeats: int, baselines: dict[str, Attend]
) -> list[dict]:
    """One record for each implementation and method, with and without ACP."""
    device, (batch, heads, _, head_dim) = problem.q.device, problem.q.shape
    shared = {
        "scope": "attention",
        "gates": gates,
        "batch": batch,
        "length_tokens": int(problem.cache.seqlens[0]),
        "layers": 1,
        "heads": heads,
        "head_dim": head_dim,
        "repeats": repeats + repeats % 2,  # many interleaved calls
        "order": ORDER,
    }
    records, calls = [], {}
    for method in ("acp", "exact"):
        kept, found = problem.kept_bytes(method), output_error(problem, method)
        assert found < 0.02, f"{method}: an error of {found:.2e} against float64"  # its time is meaningless
        ours = choose_implementation(device)
        calls[ours, method] = _graphed(functools.partial(problem.step, method), device)
        calls |= {(name, method): read for name, read in _reads(kept, device).items()}
        records.append(
            {**shared, "implementation": ours, "method": method, "kept_bytes": kept, "output_error": found}
        )
    for name, call in baselines.items():
        k, v = problem.dense()
        for method, threshold in (("acp", problem.threshold), ("exact", None)):
            # No CUDA graph, which baselines may not support: the GPU's own time without launch overhead.
            step = functools.partial(call, problem.q, k, v, problem.log_fgate, threshold)
            calls[name, method] = torch.no_grad()(step)
            records.append({**shared, "implementation": name, "method": method})
    found = interleaved(calls, device, repeats, _clock(device))
    for one in records:
        one |= in_columns(step=found[one["implementation"], one["method"]])
        if one["implementation"] not in baselines:
            one["read_ms"] = min(median(found[name, one["method"]]) for name in ("amax", "sum"))
    return records


@with_columns(*COLUMNS)
def measure_model(
    config: FoXConfig, gates: str, batch: int, length: int, repeats: int, device: torch.device
) -> Iterator[dict]:
    """One record with and one without ACP for a whole model with random weights: prefill and mean step. If
    the authors' model is installed, also its records, with bfloat16 autocast and without a CUDA graph."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    nats = -mean_gates(gates, config.num_heads)
    torch.manual_seed(0)
    prompt = torch.randint(0, config.vocab_size, (batch, length), device=device)
    methods = {"acp": config.log_pruning_tolerance, "exact": None}
    made = {choose_implementation(device): (lambda: FoXForCausalLM(config).to(dtype), _decode_once)}
    if callable(available("official", device)):
        made["official"] = (lambda: official_model(config), decode_officially)
    for name, (make, decode) in made.items():
        torch.manual_seed(0)
        model = make().to(device).requires_grad_(False)
        blocks = list(model.model.layers)
        for block in blocks:
            block.attn.fgate_proj.bias.copy_(-nats.expm1().log())  # logsigmoid(bias) = -nats

        def once(method: str, model=model, blocks=blocks, decode=decode) -> tuple:
            for block in blocks:
                block.attn.log_pruning_tolerance = methods[method]
            return decode(model, prompt, repeats)

        peaks: dict[str, int | None] = dict.fromkeys(methods)
        for method in methods:  # the first calls, which compile
            if device.type == "cuda":  # weights, cache, and the activations of a prefill
                there = torch.cuda.memory_allocated(device)
                peaks[method] = there + peak_memory(functools.partial(once, method), device)
            else:
                once(method)
        passes: dict[str, list] = {method: [] for method in methods}
        for method in itertools.chain(*orders(methods, 2)):
            passes[method].append(once(method))
        for method, found in passes.items():
            prefill_ms, step_ms, uses = zip(*found, strict=True)
            record = {
                "scope": "model",
                "gates": gates,
                "batch": batch,
                "length_tokens": length,
                "layers": config.num_hidden_layers,
                "heads": config.num_heads,
                "head_dim": config.head_dim,
                "repeats": repeats,
                "order": ORDER,
                "implementation": name,
                "method": method,
                **in_columns(prefill=prefill_ms, step=step_ms),
                "peak_bytes": peaks[method],
            }
            if name != "official":
                reads = _reads(uses[0]["kept_bytes"] + config.num_parameters() * dtype.itemsize, device)
                times = interleaved(reads, device, repeats, _clock(device)).values()
                record |= {"read_ms": min(map(median, times)), **uses[0]}
            yield record


@torch.no_grad()
def _decode_once(model: FoXForCausalLM, prompt: Tensor, repeats: int) -> tuple[float, float, dict[str, int]]:
    """Milliseconds of the prefill and of a step, and the final memory of the cache."""
    cache = FoXCache(model.config.num_hidden_layers, max_length=prompt.shape[1] + repeats + 3)
    step = DecodeStep(model, cache)
    prefill_ms = device_ms(lambda: prefill(model, prompt, cache), prompt.device)
    for _ in range(3):  # one of these captures the graph
        step(prompt[:, 0])
    total_ms = device_ms(lambda: [step(prompt[:, 0]) for _ in range(repeats)], prompt.device)
    use = cache.memory()
    kept = {"kept_bytes": int(use.per_head.sum()), "layer_kept_bytes": int(use.per_layer.sum())}
    return prefill_ms, total_ms / repeats, {**kept, "allocated_bytes": use.allocated}
