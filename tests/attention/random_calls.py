"""Random arguments for :mod:`.fuzz_on_gpu`: tensors with unusual layouts, and calls generated from a seed."""

import contextlib
import math
import random
import warnings
from dataclasses import dataclass, field

import torch

from acp_repro.attention import pruning_grid, reference
from acp_repro.attention.boundary import find_boundary
from acp_repro.attention.decay import LOG_FGATE_FLOOR, cumulative_log_fgate, cut_documents

from .budgets import expected, require

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATION = "triton" if DEVICE == "cuda" else "blockwise"
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
OWN_KERNELS = 1000  # the first seed whose case compiles its own kernels


class Memory:
    """Allocates tensors inside buffers filled with NaN, and detects writes outside the tensors.

    Args:
        rng: generates layouts.
        alignment: strides and offsets are multiples of 16 elements always ("16"), never ("1") or sometimes
            ("any"), which selects the compiled kernels.
    """

    def __init__(self, rng: random.Random, alignment: str):
        self.rng, self.alignment = rng, alignment
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def place(self, x, constant=()):
        """``x`` on the device in a random layout; its stride may be 0 along the axes ``constant``."""
        rng, odd = self.rng, {"16": 0, "1": 1}.get(self.alignment, self.rng.randint(0, 1))
        order = [*range(x.dim())]  # order of the axes in memory: heads first, time first or any
        if x.dim() > 2:
            order[:3] = rng.choice([[0, 1, 2], [0, 1, 2], [0, 2, 1], [0, 2, 1], [2, 0, 1]])
        if rng.random() < 0.1:
            order = rng.sample(order, len(order))
        expanded = [a for a in constant if rng.random() < 0.8 and (not odd or self.alignment == "any")]
        negative = x.is_floating_point() and rng.random() < 0.1
        strides, step = [0] * x.dim(), 2 if rng.random() < (0.5 if x.dim() == 1 else 0.05) else 1
        for axis in reversed(order):
            if axis not in expanded and not (x.shape[axis] == 1 and rng.random() < 0.3):
                strides[axis] = step
                step = -(-step * x.shape[axis] // 16) * 16 + rng.choice([0, 0, 16]) + odd
        offset = 16 * rng.randint(1, 3) + odd * rng.choice([1, 3, 8])
        size = offset + sum(s * (n - 1) for s, n in zip(strides, x.shape, strict=True)) + 33
        poison = math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max // 3
        buffer = torch.full((size,), poison, dtype=x.dtype, device=DEVICE)
        view = buffer.as_strided(x.shape, strides, offset)
        once = tuple(slice(0, 1) if a in expanded else slice(None) for a in range(x.dim()))
        view[once].copy_(-x[once] if negative else x[once])
        self.buffers.append((buffer, buffer.clone()))
        return torch._neg_view(view) if negative else view

    def require_unchanged(self):
        for n, pair in enumerate(self.buffers):
            same = torch.equal(*(x.view(torch.uint8) for x in pair))
            require(same, f"the memory in or around argument {n} was written to")


@contextlib.contextmanager
def surroundings(names):
    """A context with global settings that a caller may have changed."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", ".*does not compile the Hopper kernels.*")
        if "default dtype" in names:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(BRAIN)
        if "poison" in names:  # fill new tensors with NaN or the largest integer
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True, warn_only=True)
        if "autocast" in names:
            stack.enter_context(torch.autocast(DEVICE, BRAIN))
        if "anomaly" in names:
            stack.enter_context(torch.autograd.detect_anomaly(check_nan=False))
        if "stream" in names and DEVICE == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            stack.callback(torch.cuda.synchronize)
            stack.enter_context(torch.cuda.stream(stream))
        yield


# Compile-time properties: head_dim, dtype, query heads per key head, padding, alignment, lengths.
FAMILIES = [
    (64, BRAIN, 1, False, "16", "multiples of 16"),  # the Hopper kernels, on such a GPU
    (48, HALF, 3, False, "1", "any"),
    (128, BRAIN, 2, True, "16", "multiples of 16"),
    (64, SINGLE, 1, True, "16", "any"),
    (64, HALF, 2, False, "16", "multiples of 4"),
    (64, BRAIN, 1, True, "1", "any"),
    (128, HALF, 1, False, "16", "multiples of 4"),
    (16, SINGLE, 2, False, "1", "fewer queries"),
    (64, BRAIN, 1, True, "16", "multiples of 4"),
    (256, BRAIN, 1, False, "16", "fewer queries"),
    (64, HALF, 1, False, "16", "one query"),
]
LENGTHS = {
    "multiples of 16": [16, 64, 112, 128, 256, 272, 512, 704],
    "multiples of 4": [4, 60, 68, 132, 196, 500, 652],
    "any": [15, 63, 65, 129, 130, 257, 331, 513],
}
GATES = {  # minus the log gate, from an exponentially distributed x
    "local": lambda x: x * 0.3,
    "global": lambda x: x * 1e-4,
    "open": lambda x: x * 0.0,
    "tiny": lambda x: x * 1e-41,
    "closed": lambda x: x + math.inf,
    "some closed": lambda x: torch.where(x < 0.1, math.inf, torch.where(x > 3, 1e4, x * 0.01)),
    "at the floor": lambda x: -LOG_FGATE_FLOOR * (1 + (x - 1).sign() * 2.0**-20),
    "steep": lambda x: x * 200,  # c to 1e5
}
NORMS = ["1"] * 8 + ["300", "0", "one key above all"]


@dataclass
class Call:
    """A generated call: its values as float64 on the CPU, heads first, and the way to call."""

    words: list[str]  # the description in a failure message
    dtype: torch.dtype
    values: dict[str, torch.Tensor]  # q, k, v, log_fgate and dout
    constant: dict[str, tuple[int, ...]]  # axes along which values repeat
    alignment: str
    rng: random.Random
    delta: None | str | torch.Tensor = None  # (B, H) float64
    options: dict = field(default_factory=dict)

    def __str__(self):
        return ", ".join(self.words)

    @property
    def scale(self) -> float:
        return self.options.get("sm_scale", self.values["q"].shape[3] ** -0.5)

    def place(self, memory: Memory):
        """The arguments of the call: (q, k, v, log_fgate, dout) and the options."""
        given, head_first = [], memory.rng.random() < 0.4
        for name, x in self.values.items():
            if name == "v" and "k is v" in self.words:
                given.append(given[-1])
                continue
            x = x.to(SINGLE if name == "log_fgate" else self.dtype)
            if not {0, 2} & {*self.constant.get(name, ())}:
                x = self.fill_padding(x, memory.rng.choice([0.0, math.nan, math.inf]))
            x = memory.place(x, self.constant.get(name, ()))
            given.append(x if head_first else x.transpose(1, 2))
        options = {n: memory.place(x) if isinstance(x, torch.Tensor) else x for n, x in self.options.items()}
        return given, options | {"head_first": head_first}

    def fill_padding(self, x, value: float):
        """``x`` (B, H, T, ...) with ``value`` before the first real token of each row."""
        if (seq_start := self.options.get("seq_start")) is None:
            return x
        position = torch.arange(x.shape[2]) + self.values["k"].shape[2] - x.shape[2]
        padding = (position < seq_start[:, None]).view(len(x), 1, -1, *[1] * (x.dim() - 3))
        return x.masked_fill(padding, value)

    def right(self, start):
        """:func:`expected` over the blocks that ``start`` keeps, after a check of ``start``."""
        q, k, v, log_fgate, dout = (self.fill_padding(x, 0.0).to(DEVICE) for x in self.values.values())
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        grid = pruning_grid(IMPLEMENTATION, q.shape[3], self.dtype)
        names = ("seq_start", "cu_seqlens")
        seq_start, cu_seqlens = (x if x is None else x.to(DEVICE) for x in map(self.options.get, names))
        keys, longest = torch.arange(seqlen_k, device=DEVICE), seqlen_k
        visible = reference.kept_entries(start, seqlen_q, seqlen_k, *grid)
        if seq_start is not None:
            visible = visible & (keys >= seq_start[:, None, None, None])
        window = self.options.get("window_size")
        if window is not None:
            visible = visible & (keys[seqlen_k - seqlen_q :, None] - keys < window)
        if cu_seqlens is not None:
            document = torch.searchsorted(cu_seqlens.long(), keys, right=True)
            visible = visible & (document[:, None] == document)
            log_fgate = cut_documents(log_fgate, cu_seqlens)
            longest = cu_seqlens.diff().max().item()

        # The boundary matches delta up to the last bits of c. "auto" prunes at most, and nearly, as much as
        # the bound on the scores permits.
        c = cumulative_log_fgate(log_fgate)
        lower = upper = self.delta.to(DEVICE) if isinstance(self.delta, torch.Tensor) else None
        if isinstance(self.delta, str):
            norms = [x.norm(dim=-1).amax(-1) for x in (q, reference.shared_heads(k, q.shape[1]))]
            upper = -2 * norms[0] * norms[1] * self.scale - math.log(longest) - 10
            lower = upper * (1 + 2e-4)
        if cu_seqlens is not None:
            floor = torch.full_like(c[..., 0], LOG_FGATE_FLOOR / 2)
            lower, upper = (floor if x is None else x.maximum(floor) for x in (lower, upper))
        if lower is not None:
            bits = 1e-13 * (1 + c.abs().amax(-1))
            lower, upper = lower - bits, upper + bits
        least, most = (find_boundary(c, x, seqlen_q, *grid, seq_start, window) for x in (lower, upper))
        require(start.dtype == torch.int32 and start.shape == least.shape, "start_index: its dtype or shape")
        for n in ((start < least) | (start > most)).nonzero().tolist()[:1]:
            said = f"{start[tuple(n)]} and not {least[tuple(n)]} to {most[tuple(n)]}"
            raise AssertionError(f"start_index{n} is {said}")
        fall = 128.0 if IMPLEMENTATION == "blockwise" else 0.0
        return expected(q, k, v, log_fgate, visible, self.scale, self.dtype, dout, fall)


def draw_call(seed: int, **fixed) -> Call:
    """The call of a seed, with the choices in ``fixed`` replaced by name."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def pick(name, options):
        chosen = rng.choice(options)  # always drawn, so that later choices are unchanged
        return fixed.get(name, chosen)

    head_dim, dtype, group, padded, alignment, lengths = FAMILIES[fixed.get("family", seed % len(FAMILIES))]
    if seed >= OWN_KERNELS:
        head_dim = rng.choice([16, 20, 32, 64, 64, 80, 96, 128, 128, 200, 256])
        dtype, group, alignment = rng.choice([HALF, BRAIN, SINGLE]), rng.choice([1, 2, 3, 5]), "any"
        padded, lengths = rng.random() < 0.3, rng.choice([*LENGTHS, "fewer queries", "one query"])
    dtype = fixed.get("dtype", dtype)
    seqlen_q = seqlen_k = pick("length", LENGTHS.get(lengths, LENGTHS["any"]))
    if lengths not in LENGTHS:
        seqlen_q = 1 if lengths == "one query" else rng.randrange(3, seqlen_k, 2)
    batch, kv_heads = rng.choice([1, 2, 3]), rng.choice([1, 2, 2, 7 if seqlen_k < 200 else 3])
    heads, packed = group * kv_heads, pick("packed", [True, True, False, False, False])
    packed = packed and not padded and seqlen_q == seqlen_k
    batch = 1 if packed else batch
    norm, dout_of = pick("norm", NORMS), pick("dout", ["all", "all", "all", "pooled", "summed"])
    norm = "1" if packed else norm  # scores of documents may not differ by 4,900
    gates = [pick("gates", ["local", "global", "local", "global", *GATES]) for _ in range(heads)]
    words = [f"seed {seed}", f"{batch} x {kv_heads} * {group} heads of {head_dim}", str(dtype)[6:]]
    words += [f"{seqlen_q} of {seqlen_k} tokens", f"norm {norm}", f"gates {sorted(set(gates))}"]

    shapes = {"q": (heads, seqlen_q), "k": (kv_heads, seqlen_k), "v": (kv_heads, seqlen_k)}
    shapes["dout"], constant = shapes["q"], {}
    q, k, v, dout = (
        torch.randn(batch, *shape, head_dim, generator=generator, dtype=SINGLE) for shape in shapes.values()
    )
    if norm == "300":
        q, k = (x * (300 / x.norm(dim=-1, keepdim=True)) for x in (q, k))
    elif norm == "0":
        q = q * 0
    elif norm == "one key above all":
        q[:, :, seqlen_q // 2 :], k[:, :, seqlen_k // 3] = 3.0, 3.0
    for name, x in (("q", q), ("k", k), ("v", v)):
        if rng.random() < 0.1:
            constant[name] = (rng.choice([0, 1]),)
            x.copy_(x.narrow(*constant[name], 0, 1).expand_as(x).clone())
    if rng.random() < 0.05:
        v.copy_(k)
        words.append("k is v")
    if dout_of != "all":
        constant["dout"] = (2,) if dout_of == "pooled" else (0, 1, 2, 3)
        dout = (dout[:, :, :1] if dout_of == "pooled" else dout[:1, :1, :1, :1]).expand_as(q)
        words.append(f"gradient {dout_of}")
    falls = torch.empty(batch, heads, seqlen_k, dtype=SINGLE).exponential_(generator=generator)
    log_fgate = torch.stack([-GATES[name](falls[:, h]) for h, name in enumerate(gates)], 1).double()
    q, k, v, dout = (x.to(dtype).double() for x in (q, k, v, dout))
    values = {"q": q, "k": k, "v": v, "log_fgate": log_fgate, "dout": dout}
    call = Call(words, dtype, values, constant, alignment, rng)
    if rng.random() < 0.3:
        call.options["sm_scale"] = rng.choice([0.05, 0.2, 1.0 / head_dim])
    if padded:
        starts = [rng.choice([0, rng.randrange(seqlen_k), rng.randrange(seqlen_k)]) for _ in range(batch)]
        call.options["seq_start"] = torch.tensor(starts)
        words.append(f"seq_start {starts}")
    if packed:
        cuts = sorted(rng.choices(range(seqlen_k + 1), k=rng.choice([0, 1, 3, 9])))
        cu_seqlens = torch.tensor([0, *cuts, seqlen_k], dtype=rng.choice([torch.int32, torch.int64]))
        call.options["cu_seqlens"] = cu_seqlens
        words.append(f"documents {cu_seqlens.diff().tolist()}")
        log_fgate = cut_documents(log_fgate, cu_seqlens)

    def draw_delta():
        """Thresholds; half of them equal the decay of a block up to a few bits of float32."""
        row = rng.randrange(0, seqlen_q, 128) + seqlen_k - seqlen_q
        column = max(0, rng.randrange(0, row // 64 + 1) * 64 - 1)
        b, h, factor = rng.randrange(batch), rng.randrange(heads), rng.choice([1, 1 - 1e-6, 1 + 1e-6])
        c = cumulative_log_fgate(log_fgate[b, h])
        near = torch.tensor((c[row] - c[column]).item() * factor, dtype=SINGLE).item()
        return rng.choice([near, near, near, near, -0.0, -1.0, -12.0, -1e9])

    kind = pick("threshold", [None, "auto", "number", "tensor", "tensor"])
    if kind == "auto":
        call.delta = call.options["adaptive_threshold"] = "auto"
    elif kind is not None:
        shape = rng.choice([(batch, heads), (batch, heads), (heads,), (batch, 1), (1,), ()])
        shape = shape if kind == "tensor" else ()
        delta = torch.tensor([draw_delta() for _ in range(math.prod(shape))], dtype=SINGLE).view(shape)
        call.delta = delta.double().expand(batch, heads)
        given = delta.to(rng.choice([SINGLE, torch.float64])) if kind == "tensor" else delta.item()
        call.options["adaptive_threshold"] = given
        kind = f"{kind} {tuple(shape) or delta.item()}"
    words.append(f"threshold {kind}")
    around = ["default dtype", "poison", "autocast", "anomaly", "stream"]
    words += pick("around", [[name for name in around if rng.random() < 0.2]])
    window = pick("window", [None, None, None, 1, 63, 64, 65, 130])
    if window is not None:
        call.options["window_size"] = window
        words.append(f"window {window}")
    return call
