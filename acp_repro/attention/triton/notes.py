"""What one run of a pass allocates and launches, noted and made into a plan that repeats it.

See :mod:`.launch` for why. The order of the launcher's arguments differs between Triton versions. So we run
Triton's launcher once with a recording function and keep what it passes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Triton compiles a kernel for addresses that are multiples of this, and another for the rest.
ALIGNMENT = 16
# Where the pieces of one allocation start.
_PIECE = 256
_STREAM = object()  # stands for the stream among noted arguments
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_thread = threading.local()


def current() -> Notes | None:
    """The notes that this thread is taking."""
    return getattr(_thread, "notes", None)


def current_stream(device: torch.device) -> int:
    """The CUDA stream of the device, as Triton asks for it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


class Refused:
    """In the place of a plan: why there is none."""

    def __init__(self, reason: str):
        self.refused = reason


class Plan:
    """A pass as its launches: what to allocate, and what to give each launcher in C.

    Everything that a launcher may be given stands in one list, in this order: the addresses of inputs,
    results and pieces of scratch memory, those of views, tensor maps, the stream, and constants.
    """

    refused = None

    def __init__(self, results, pieces, views, maps, constants, launches, kernels, compiled):
        self.results = results  # (shape, strides or None if contiguous, dtype); or None for None
        self.offsets: list[int] = []
        size = 0
        for piece in pieces:
            self.offsets.append(size)
            size += -(-piece.untyped_storage().nbytes() // _PIECE) * _PIECE
        self.scratch = size // 8
        self.views = views  # (position of an address, offset)
        self.maps = maps  # (function of an address, its position)
        self.constants = constants
        self.launches = launches  # (launcher, choice of its arguments, choice of its last if that is a list)
        self.kernels = kernels
        self.compiled = compiled  # kept, since one that is dropped may take its function off the GPU

    def __call__(self, given: list[int], device: torch.device) -> tuple[Tensor | None, ...]:
        """The pass on inputs at these addresses, on the current stream of the device, which is current."""
        results = []
        for layout in self.results:
            x = None
            if layout is not None:
                shape, strides, dtype = layout
                if strides is None:
                    x = torch.empty(shape, dtype=dtype, device=device)
                else:
                    x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                given.append(x.data_ptr())
            results.append(x)
        if self.scratch:
            # One allocation for all pieces. It is given back when the stream holds all launches.
            scratch = torch.empty(self.scratch, dtype=torch.int64, device=device)
            base = scratch.data_ptr()
            given += [base + offset for offset in self.offsets]
        given += [given[position] + offset for position, offset in self.views]
        given += [encode(given[position]) for encode, position in self.maps]
        given.append(current_stream(device))
        given += self.constants
        for launcher, head, last in self.launches:
            if last is None:
                launcher(*head(given))
            else:
                launcher(*head(given), last(given))
        return tuple(results)


class Notes(TorchDispatchMode):
    """Sees every operator of PyTorch and every launch of one run of a function."""

    def __init__(self, tensors: list[Tensor | None]):
        super().__init__()
        # Another object for each, since the same tensor may be given twice and need not be next time.
        self.inputs = [None if x is None else x.detach() for x in tensors]
        self.allocated: list[Tensor] = []  # kept to the end, so that no address comes twice
        self.launches: list[tuple[Callable, tuple, list]] = []
        self.kernels: list = []
        self.compiled: list = []
        self.refused: str | None = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in _ALLOCATIONS:
            self.allocated.append(result)
        elif not _makes_views(function):
            self._refuse(f"it calls {function}")
        return result

    def run(self, function: Callable, constants: tuple) -> tuple[Tensor | None, ...]:
        """What ``function`` returns, with its launches noted."""
        _thread.notes = self
        try:
            with self:
                return function(*self.inputs, constants)
        finally:
            _thread.notes = None

    def add(self, kernel, compiled, grid, arguments, constants) -> None:
        """Notes one launch."""
        self.kernels.append(kernel)
        self.compiled.append(compiled)
        try:
            self.launches.append(trace(kernel, compiled, grid, arguments, constants))
        # A Triton of another make fails here in a way of its own, and its own way of launching is there.
        except Exception as error:
            self._refuse(f"Triton {triton.__version__} does not show how it launches: {error!r}")

    def _refuse(self, reason: str) -> None:
        self.refused = self.refused or reason

    def plan(self, results: tuple[Tensor | None, ...]) -> Plan | Refused:
        """How to repeat the run that returned ``results``, or why that cannot be done."""
        if self.refused is None:
            try:
                return self._plan(results)
            except LookupError as error:
                self._refuse(str(error))
        return Refused(self.refused)

    def _plan(self, results: tuple[Tensor | None, ...]) -> Plan:
        made = [x for x in results if x is not None]
        if any(x.data_ptr() % ALIGNMENT for x in self.allocated):
            raise LookupError("memory that PyTorch allocated is not aligned")
        whole = [_layout(x) for x in made]
        if not all(whole.count(one) == 1 and one in map(_layout, self.allocated) for one in whole):
            raise LookupError("it returns what it did not allocate")
        pieces = [x for x in self.allocated if _layout(x) not in whole]
        table = _Table(self.inputs, [*made, *pieces])
        for one in self.launches:
            table.add(*one)
        layouts = [
            None if x is None else (x.shape, None if x.is_contiguous() else x.stride(), x.dtype)
            for x in results
        ]
        return Plan(layouts, pieces, *table.finish(), self.kernels, self.compiled)


def _layout(x: Tensor) -> tuple:
    """What makes a tensor the whole of an allocation; PyTorch may show one as different objects."""
    return x.untyped_storage().data_ptr(), x.data_ptr(), x.shape, x.stride(), x.dtype


def _makes_views(function) -> bool:
    returns = function._schema.returns
    return bool(returns) and all(x.alias_info is not None and not x.alias_info.is_write for x in returns)


class _Table:
    """Gives every argument of every launch its place in the one list of a plan."""

    def __init__(self, inputs: list[Tensor | None], own: list[Tensor]):
        self.slots = {id(x): n for n, x in enumerate(inputs) if x is not None}
        self.own = {x.untyped_storage().data_ptr(): len(inputs) + n for n, x in enumerate(own)}
        self.count = len(inputs) + len(own)
        self.views: list[tuple[int, int]] = []
        self.maps: list[tuple[Callable, tuple]] = []
        self.described: dict[tuple, int] = {}
        self.constants: list = []
        self.launches: list[tuple[Callable, list, list | None]] = []

    def add(self, launcher: Callable, arguments: tuple, descriptors: list[tuple]) -> None:
        """One launch, as :func:`trace` tells it."""
        described = iter(descriptors)

        def place(x) -> tuple[str, int]:
            if isinstance(x, Tensor):
                return self._address(x)
            if x is _STREAM:
                return "stream", 0
            if type(x).__name__ == "PyCUtensorMap":
                return self._map(*next(described))
            self.constants.append(x)
            return "constant", len(self.constants) - 1

        *head, last = arguments
        together = isinstance(last, (list, tuple))  # from Triton 3.7 on, all of the kernel's
        head = [place(x) for x in (head if together else arguments)]
        self.launches.append((launcher, head, [place(x) for x in last] if together else None))
        if next(described, None) is not None:
            raise LookupError("Triton does not give its launcher a tensor map for each descriptor")

    def _address(self, x: Tensor) -> tuple[str, int]:
        if id(x) in self.slots:
            return "address", self.slots[id(x)]
        storage = x.untyped_storage().data_ptr()
        if storage not in self.own:
            raise LookupError("it launches a kernel on a tensor that is neither an argument nor its own")
        view = (self.own[storage], x.data_ptr() - storage)
        if view[1] == 0:
            return "address", view[0]
        if view not in self.views:
            self.views.append(view)
        return "view", self.views.index(view)

    def _map(self, key: tuple, base: Tensor, encode: Callable) -> tuple[str, int]:
        where = self._address(base)
        if (key, where) not in self.described:
            self.described[key, where] = len(self.maps)
            self.maps.append((encode, where))
        return "map", self.described[key, where]

    def finish(self) -> tuple:
        """(views, maps, constants, launches) of a plan."""
        first = {"address": 0, "view": self.count}
        first["map"] = first["view"] + len(self.views)
        first["stream"] = first["map"] + len(self.maps)
        first["constant"] = first["stream"] + 1

        def at(place: tuple[str, int]) -> int:
            return first[place[0]] + place[1]

        def choice(places: list | None):
            return None if places is None else itemgetter(*map(at, places))

        launches = [(launcher, choice(head), choice(last)) for launcher, head, last in self.launches]
        return self.views, [(encode, at(where)) for encode, where in self.maps], self.constants, launches


def trace(kernel, compiled, grid, arguments, constants) -> tuple[Callable, tuple, list[tuple]]:
    """What Triton's launcher gives its function in C for this launch, without launching.

    Read in Triton 3.6 to 3.9. What is relied on: ``compiled.run`` is an object that calls its attribute
    ``launch``, and this is the function in C, or makes tensor maps of descriptors and calls ``launcher``.

    Returns:
        The function in C; its arguments; and for each tensor map among them, in order: what tells its
        descriptor from others, the descriptor's base, and the tensor map as a function of an address.

    Raises:
        Exception: of any kind, where this Triton does it in another way or the kernel needs more.
    """
    parameters = kernel.signature.parameters
    bound = kernel.signature.bind(*arguments, **{n: x for n, x in constants.items() if n in parameters})
    bound.apply_defaults()
    given = tuple(bound.arguments.values())
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise RuntimeError("the kernel needs scratch memory")
    seen: list[tuple] = []

    def see(*all_arguments):
        seen.append(all_arguments)

    twin = copy.copy(launcher)
    twin.launch = see
    function, descriptors = launcher.launch, []
    if inspect.isfunction(function):
        function = inspect.getclosurevars(function).nonlocals["launcher"]
        module = sys.modules[type(launcher).__module__]
        signature = dict(enumerate(compiled.src.signature.values()))
        meta = compiled.metadata.tensordesc_meta
        twin.launch = module.wrap_handle_tensordesc(see, signature, meta)
        if meta:
            kinds = zip(given, signature.values(), strict=True)
            bases = [x for x, kind in kinds if isinstance(kind, str) and kind.startswith("tensordesc")]
            make = module.make_tensordesc_arg
            descriptors = [_described(make, x, one) for x, one in zip(bases, meta, strict=True)]
    sizes = (*grid, 1, 1)[:3]
    twin(*sizes, _STREAM, compiled.function, compiled.packed_metadata, None, None, None, *given)
    (arguments_in_c,) = seen
    return function, arguments_in_c, descriptors


class _Base:
    """The base of a descriptor, as far as Triton asks for it."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def _described(make: Callable, descriptor: Any, meta: dict) -> tuple[tuple, Tensor, Callable]:
    """The last of what :func:`trace` returns. A tensor map depends on its address and on constants alone,
    so those of the latest addresses are kept."""
    like = copy.copy(descriptor)
    like.base = None
    more = (None,) * (len(inspect.signature(make).parameters) - 2)  # Triton 3.8 has one parameter more

    @functools.lru_cache(maxsize=256)
    def encode(address: int):
        one = copy.copy(like)
        one.base = _Base(address)
        return make(one, meta, *more)[0]

    key = (tuple(like.shape), tuple(like.strides), like.padding, repr(sorted(meta.items())))
    return key, descriptor.base, encode
