"""Emulates Gluon kernels for Hopper on a CPU, because Triton's interpreter does not support them.

The Python source of a kernel runs with PyTorch in place of the language. The emulation covers asynchrony:

- warp groups are threads, which synchronise at barriers in shared memory as on the GPU;
- data written by the copy engine is NaN until a wait has completed;
- a matrix product reads shared memory only when the kernel waits for the product.

A stage that is read or released too early therefore gives NaN or a different number, and a barrier that never
completes raises an error. Layouts, registers and speed are not emulated; they are tested with a compiler and
on a GPU. :func:`launch` replaces the launch function of the project.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PATIENCE_S = 20.0  # the timeout of a barrier
_here = threading.local()  # the pending products of each thread
_program: dict[str, Any] = {}  # the running program: its number, the lock of its barriers, its failures


class Value(torch.Tensor):
    """A tensor of the kernel; a scalar has no dimension."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


def value(x, dtype=None) -> Value:
    return torch.as_tensor(x, dtype=dtype).as_subclass(Value)


class Pointer:
    """Addresses of elements: positions in ``memory``, a flat tensor."""

    def __init__(self, memory: torch.Tensor, position):
        self.memory, self.position = memory, position
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to_tensor(cls, x: torch.Tensor) -> Pointer:
        size = x.untyped_storage().nbytes() // x.itemsize
        flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, (size,), (1,))
        return cls(flat, value(x.storage_offset(), torch.int64))

    def __add__(self, offset):
        return Pointer(self.memory, self.position + value(offset).to(torch.int64))

    def inside(self, mask, shape=()):
        """(positions, mask) of one shape; every unmasked position is inside the memory."""
        mask = value(True if mask is None else mask)
        position, mask = torch.broadcast_tensors(self.position, mask.expand(shape) if shape else mask)
        if (mask & ((position < 0) | (position >= len(self.memory)))).any():
            raise IndexError(f"an address outside of {len(self.memory)} elements")
        return position, mask


def load(pointer: Pointer, mask=None, other=None) -> Value:
    position, mask = pointer.inside(mask)
    nothing = float("nan") if pointer.memory.is_floating_point() else 0x7FC00000
    out = torch.full(position.shape, nothing if other is None else other, dtype=pointer.memory.dtype)
    out[mask] = pointer.memory[position[mask]]
    return out.as_subclass(Value)


def store(pointer: Pointer, x, mask=None) -> None:
    x = value(x)
    position, mask = pointer.inside(mask, x.shape)
    pointer.memory[position[mask]] = x.expand(position.shape)[mask].to(pointer.memory.dtype)


class Described:
    """A descriptor of a matrix in global memory for the copy engine."""

    def __init__(self, descriptor: TensorDescriptor):
        self.pointer, self.dtype = Pointer.to_tensor(descriptor.base), descriptor.base.dtype
        self.shape, self.strides = descriptor.shape, descriptor.strides
        self.box, self.layout = descriptor.block_shape, descriptor.layout

    def read(self, corner: Sequence) -> Value:
        """The box at ``corner``, zero-padded past the end."""
        offset, inside = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
        for first, size, stride, count in zip(corner, self.box, self.strides, self.shape, strict=True):
            along = int(first) + torch.arange(size)
            offset = offset[..., None] + along * stride
            inside = inside[..., None] & (along >= 0) & (along < count)
        return load(self.pointer + offset[0], inside[0], 0)


class Shared:
    """Shared memory, or a slice of it."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.dtype = memory, memory.dtype

    def index(self, i):
        return Shared(self.memory[int(i)])

    def reshape(self, shape):
        return Shared(self.memory.view(*shape))

    def permute(self, order):
        return Shared(self.memory.permute(*order))

    def reinterpret(self, dtype, shape, layout):
        return Shared(self.memory.view(dtype).view(*shape))

    _reinterpret = reinterpret

    def load(self, layout=None) -> Value:
        return self.memory.clone().as_subclass(Value)


class Barrier:
    """An mbarrier: a phase ends when all threads and all expected bytes have arrived."""

    def __init__(self):
        self.count = self.missing = self.announced = self.phase = 0
        self.copies: list[Callable[[], int]] = []

    def settle(self) -> None:
        if self.missing == 0 and self.announced == 0:
            self.phase, self.missing = self.phase + 1, self.count
            _program["lock"].notify_all()


class Barriers(Barrier):
    def __init__(self, number: int):
        super().__init__()
        self.index = [Barrier() for _ in range(number)].__getitem__


class mbarrier:
    """Emulates the module ``hopper.mbarrier``, hence the lower-case name."""

    MBarrierLayout = staticmethod(lambda: "barriers")

    @staticmethod
    def init(bar, count):
        bar.count = bar.missing = count

    @staticmethod
    def expect(bar, bytes, pred=True):
        if pred:
            with _program["lock"]:
                bar.announced += bytes
                bar.missing -= 1
                bar.settle()

    @staticmethod
    def arrive(bar, count=1, pred=True):
        if pred:
            with _program["lock"]:
                bar.missing -= count
                bar.settle()

    @staticmethod
    def wait(bar, phase, pred=True):
        lock = _program["lock"]
        with lock:
            while pred and bar.phase & 1 == int(phase):
                while bar.copies:
                    bar.announced -= bar.copies.pop(0)()
                    bar.settle()
                if bar.phase & 1 == int(phase) and (not lock.wait(PATIENCE_S) or _program["failures"]):
                    raise TimeoutError(f"nobody completes phase {bar.phase} of a barrier")


def copy_tile(described: Described, corner, bar: Barrier, target: Shared, pred=True) -> None:
    if not pred:
        return
    nan = float("nan") if target.memory.is_floating_point() else 0x7FC00000
    target.memory.fill_(nan)

    def come() -> int:
        target.memory.copy_(described.read(corner).view(target.memory.shape))
        return target.memory.numel() * target.memory.itemsize

    with _program["lock"]:
        bar.copies.append(come)
        _program["lock"].notify_all()


class Product:
    """An asynchronous product, which has no value before a wait."""

    def __init__(self, a, b, acc):
        self.factors, self.acc, self.done = (a, b), acc, None

    def compute(self) -> None:
        a, b = ((x.load() if isinstance(x, Shared) else x).to(torch.float32) for x in self.factors)
        self.done = a @ b if self.acc is None else a @ b + getattr(self.acc, "done", self.acc)


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    product = Product(a, b, acc if use_acc else None)
    _here.__dict__.setdefault("products", []).append(product)
    return product if is_async else warpgroup_mma_wait(0, [product])


def warpgroup_mma_wait(outstanding, deps):
    asked = _here.__dict__.setdefault("products", [])
    while len(asked) > outstanding:
        asked.pop(0).compute()
    known = [x if getattr(x, "done", None) is None else x.done for x in deps]
    return known[0] if len(known) == 1 else known


def warp_specialize(parts, *_) -> None:
    def work(function, arguments):
        try:
            function(*arguments)
        except Exception as error:
            with _program["lock"]:
                _program["failures"].append(error)
                _program["lock"].notify_all()

    threads = [threading.Thread(target=work, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if _program["failures"]:
        raise _program["failures"][0]


def allocate_shared_memory(dtype, shape, layout):
    if layout == "barriers":
        return Barriers(shape[0])
    nan = float("nan") if dtype.is_floating_point else 0x7FC00000
    return Shared(torch.full([int(n) for n in shape], nan, dtype=dtype))


class Language:
    """The parts of ``gl`` and ``tl`` that the kernels use."""

    int32, int64, float16, bfloat16, float32 = (
        getattr(torch, name) for name in ("int32", "int64", "float16", "bfloat16", "float32")
    )
    load, store, warp_specialize = map(staticmethod, (load, store, warp_specialize))
    allocate_shared_memory = staticmethod(allocate_shared_memory)
    static_range, constexpr = range, staticmethod(lambda x: x)
    program_id = staticmethod(lambda axis: value(_program["number"], torch.int32))
    arange = staticmethod(lambda first, last, layout=None: value(torch.arange(first, last), torch.int32))
    zeros = staticmethod(lambda shape, dtype, layout=None: value(torch.zeros(shape), dtype))
    cdiv = staticmethod(lambda x, y: (x + y - 1) // y)
    where = staticmethod(lambda condition, x, y: torch.where(value(condition), x, y))
    minimum = staticmethod(lambda x, y: torch.minimum(value(x), value(y)))
    maximum = staticmethod(lambda x, y: torch.maximum(value(x), value(y)))
    exp2, log2 = staticmethod(torch.exp2), staticmethod(torch.log2)
    sum = staticmethod(lambda x, axis: x.sum(axis))
    max = staticmethod(lambda x, axis: x.amax(axis))
    reshape = staticmethod(lambda x, shape: x.reshape(shape))
    expand_dims = staticmethod(lambda x, axis: x.unsqueeze(axis))
    convert_layout = staticmethod(lambda x, layout: x)

    @staticmethod
    def static_assert(condition):
        assert condition

    def __getattr__(self, name):
        if name.endswith("Layout"):
            return lambda *_: None
        raise AttributeError(f"gluon_on_cpu.py does not know `{name}`: add it there")


_REPLACED = {
    id(gl): Language(),
    id(tl): Language(),
    id(hopper.mbarrier): mbarrier,
    id(getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared): copy_tile,
    id(hopper.warpgroup_mma): warpgroup_mma,
    id(hopper.warpgroup_mma_wait): warpgroup_mma_wait,
    id(hopper.warpgroup_mma_init): lambda x: x,
}


@functools.cache
def plain(function: Callable) -> Callable:
    """A function of a kernel whose globals are replaced by their PyTorch counterparts."""
    named = set(function.__code__.co_names)
    names = {name: replaced(x) for name, x in function.__globals__.items() if name in named}
    return types.FunctionType(
        function.__code__, names | {"__builtins__": __builtins__}, function.__name__, function.__defaults__
    )


def replaced(x):
    if id(x) in _REPLACED:
        return _REPLACED[id(x)]
    if isinstance(x, gl.constexpr):
        return x.value
    inner = getattr(x, "fn", None)
    if isinstance(x, triton.runtime.jit.ConstexprFunction):
        return inner
    return plain(inner) if inspect.isfunction(inner) else x


def launch(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Replaces :func:`acp_repro.attention.triton.launch.launch`; runs one program at a time."""

    def inside(x):
        if isinstance(x, torch.Tensor):
            return Pointer.to_tensor(x)
        if isinstance(x, TensorDescriptor):
            return Described(x)
        if isinstance(x, tuple):  # a NamedTuple of strides
            return type(x)(*map(inside, x))
        if isinstance(x, int):
            return value(x, torch.int32 if abs(x) < 2**31 else torch.int64)
        return value(x, torch.float32) if isinstance(x, float) else x

    known = inspect.signature(kernel.fn).parameters
    constants = {name: x for name, x in constants.items() if name in known}
    for number in range(grid[0]):
        _program.update(number=number, lock=threading.Condition(), failures=[])
        plain(kernel.fn)(*map(inside, arguments), **constants)
