"""Recorded launches, which save Triton's host time for each launch of a kernel.

``kernel[grid](...)`` costs the host 30 to 100 microseconds, and a pass of attention makes four such calls. A
pass that only allocates and launches repeats the same steps for the same shapes, strides and alignments; only
the addresses of its tensors change. `repeat_launches` records the second run of such a function. Later calls
replay the launches of Triton's compiled kernels with the new addresses.

A pass is launched by Triton itself if a replay could differ: if the pass calls an operator of PyTorch other
than an allocation or a view, while a profiler or a dispatch mode of PyTorch is active, or if this version of
Triton calls compiled kernels in another way. The logger of this module reports at level debug which passes
are not replayed, and why.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
from collections.abc import Callable
from itertools import accumulate, starmap
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from .tiles import enter_device

# Triton compiles separate kernels for addresses that are multiples of this number and for other addresses.
ALIGNMENT = 16
# The maximum number of plans per function, about ten kilobytes each; one more clears them all.
MOST_PLANS = 1024
_PIECE = 256  # the alignment of the pieces of one allocation, in bytes
_SEEN = object()  # marks a key with which one call was made
_STREAM = object()  # marks where the stream goes among recorded arguments
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_thread = threading.local()
_log = logging.getLogger(__name__)


def find_portable_request() -> str | None:
    """The environment's request to launch portable kernels only, in one line, or None."""
    return {"1": "ACP_REPRO_PORTABLE=1 is in the environment"}.get(os.environ.get("ACP_REPRO_PORTABLE", ""))


def launch(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Launches ``kernel[grid](*arguments, **constants)`` on the device of the first tensor, and records the
    launch if a `repeat_launches` function is being recorded."""
    try:
        with enter_device(next(x for x in arguments if isinstance(x, Tensor))):
            compiled = kernel[grid](*arguments, **constants)
    except RuntimeError as error:
        if "C compiler" in str(error):  # Triton builds its launcher with one
            raise RuntimeError(
                "Triton needs a C compiler: install gcc, or pass implementation='blockwise'"
            ) from error
        raise
    recording = getattr(_thread, "recording", None)
    if recording is not None:
        recording.launches.append((kernel, compiled, grid, arguments, constants))


def repeat_launches(function: Callable) -> Callable:
    """Wraps ``function(*tensors, constants)``, which allocates and launches, so that calls are replayed.

    The function takes tensors of one device or None, of which the first is a tensor, and a tuple of hashable
    constants that determines everything else. It returns tensors that it allocated, not views of them, or
    None. The first call for each key (constants; layout, dtype, device and alignment of each tensor) runs the
    function, the second records it, and later calls replay it.
    """
    plans: dict[tuple, Any] = {}

    @functools.wraps(function)
    def call(*arguments):
        *tensors, constants = arguments
        if not can_repeat(tensors[0]):
            return function(*arguments)
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        layouts = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
        key = (constants, *layouts, *[address % ALIGNMENT for address in addresses])
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= MOST_PLANS:
                plans.clear()
            plans[key] = _SEEN  # recording pays only for shapes that recur
        elif plan is _SEEN:
            results, plans[key] = _Recording(tensors).run(function, constants)
            return results
        elif isinstance(plan, Plan):
            with enter_device(tensors[0]):
                return plan(addresses, tensors[0].device)
        return function(*arguments)

    call.plans = plans
    return call


def can_repeat(x: Tensor) -> bool:
    """Whether launches for ``x`` may bypass Triton's binder: on an NVIDIA GPU without profilers or modes."""
    runtime = knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return x.is_cuda and not (
        torch.version.hip
        or torch._C._len_torch_dispatch_stack()
        or any(getattr(hook, "calls", hook) for hook in hooks)  # a chain of hooks, or a hook of the user
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or find_portable_request()  # a replay would use the recorded kernels
        or getattr(runtime, "add_stages_inspection_hook", None)
    )


def bind_arguments(kernel, compiled, grid, arguments, constants) -> tuple[Callable, list]:
    """The launcher of a compiled kernel and its arguments, with ``_STREAM`` in place of the stream."""
    parameters = kernel.signature.parameters
    bound = kernel.signature.bind(*arguments, **{n: x for n, x in constants.items() if n in parameters})
    bound.apply_defaults()
    hooks = (None, None, None)  # the launch's metadata for profilers, what they call before and after
    sizes = (*grid, 1, 1)[:3]
    where = (*sizes, _STREAM, compiled.function, compiled.packed_metadata, *hooks)
    return compiled.run, [*where, *bound.arguments.values()]


class _Recording(TorchDispatchMode):
    """Records every PyTorch operator and every launch during one run of a function."""

    def __init__(self, tensors: list[Tensor | None]):
        super().__init__()
        # A separate object for each argument: the same tensor may be passed twice now and once later.
        self.inputs = [None if x is None else x.detach() for x in tensors]
        self.allocated: list[Tensor] = []  # kept alive, so that no address is used twice
        self.launches: list[tuple] = []
        self.others: list = []  # operators that are neither allocations nor views

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in _ALLOCATIONS:
            self.allocated.append(result)
        elif not all(x.alias_info and not x.alias_info.is_write for x in function._schema.returns):
            self.others.append(function)
        return result

    def run(self, function: Callable, constants: tuple) -> tuple[tuple[Tensor | None, ...], Plan | bool]:
        """The result of ``function``, and the plan that replays its launches, or False if there is none."""
        _thread.recording = self
        try:
            with self:
                results = function(*self.inputs, constants)
        finally:
            _thread.recording = None
        try:
            return results, Plan(self, results)
        except (LookupError, AttributeError, TypeError) as error:  # the last two: another version of Triton
            _log.debug("%s is not repeated: %r", function.__qualname__, error)
            return results, False


class Plan:
    """A recorded pass: its allocations, and the arguments of each kernel."""

    # One list contains every argument of the kernels: the addresses of inputs, results and pieces of scratch
    # memory, the stream, values derived from an address, and then the constants.

    def __init__(self, recording: _Recording, results: tuple[Tensor | None, ...]):
        if recording.others:
            raise LookupError(f"it calls {recording.others[0]}")
        whole = {_extent(x): x for x in recording.allocated}
        made = [whole.pop(_extent(x)) for x in results if x is not None]  # KeyError if it was not allocated
        pieces = list(whole.values())
        if any(x.data_ptr() % ALIGNMENT for x in recording.allocated):
            raise LookupError("memory that PyTorch allocated is not aligned")
        self.results = [None if x is None else (x.shape, x.stride(), x.dtype) for x in results]
        ends = accumulate(-(-x.untyped_storage().nbytes() // _PIECE) * _PIECE for x in pieces)
        *self.offsets, self.scratch = 0, *ends
        inputs, own = recording.inputs, [*made, *pieces]
        self._slots = {id(x): n for n, x in enumerate(inputs) if x is not None}
        # A view of an input is identified by its address, if no other input has the same one.
        places = [None if x is None else x.data_ptr() for x in inputs]
        self._views = {at: n for n, at in enumerate(places) if places.count(at) == 1}
        self._own = {x.untyped_storage().data_ptr(): len(inputs) + n for n, x in enumerate(own)}
        self._stream = len(inputs) + len(own)
        self._places: dict[tuple, int] = {}
        self.derived: list[tuple[Callable[[int], Any], int]] = []  # (function, index of its argument)
        self.constants: list = []
        # Kernels are kept alive, because the destructor of a kernel may unload it from the GPU.
        self.kernels = [compiled for _, compiled, *_ in recording.launches]
        self.launches = []
        for run, arguments in starmap(bind_arguments, recording.launches):
            self.launches.append((run, itemgetter(*map(self._place, arguments))))
        self.constants.reverse()

    def _place(self, x) -> int:
        """The index of this argument in the list of values."""
        if x is _STREAM:
            return self._stream
        if isinstance(x, Tensor):
            return self._address(x)
        if hasattr(x, "block_shape"):  # a descriptor of Triton's or of Gluon's
            return self._derive(id(x), _descriptors_like(x), self._address(x.base))
        self.constants.append(x)
        return -len(self.constants)

    def _address(self, x: Tensor) -> int:
        if id(x) in self._slots:
            return self._slots[id(x)]
        if x.data_ptr() in self._views:
            return self._views[x.data_ptr()]
        storage = x.untyped_storage().data_ptr()
        if storage not in self._own:
            raise LookupError("it launches a kernel on a tensor that is neither an argument nor its own")
        offset, place = x.data_ptr() - storage, self._own[storage]
        return self._derive(offset, offset.__add__, place) if offset else place

    def _derive(self, key: int, function: Callable, place: int) -> int:
        if (key, place) not in self._places:
            self.derived.append((function, place))
            self._places[key, place] = self._stream + len(self.derived)
        return self._places[key, place]

    def __call__(self, values: list, device: torch.device) -> tuple[Tensor | None, ...]:
        """Runs the pass on inputs at these addresses, on the current stream of the current device."""
        results = [
            None if one is None else torch.empty_strided(*one[:2], dtype=one[2], device=device)
            for one in self.results
        ]
        values += [x.data_ptr() for x in results if x is not None]
        if self.scratch:
            # One allocation for all pieces, freed once all launches are in the stream.
            scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
            values += map(scratch.data_ptr().__add__, self.offsets)
        values.append(torch._C._cuda_getCurrentRawStream(device.index))  # as Triton asks for it
        for function, place in self.derived:
            values.append(function(values[place]))
        values += self.constants
        for run, arguments in self.launches:
            run(*arguments(values))
        return tuple(results)


def _extent(x: Tensor) -> tuple:
    """The identity of a tensor that spans its allocation; PyTorch may wrap it in several objects."""
    return x.untyped_storage().data_ptr(), x.data_ptr(), x.numel(), x.dtype


def _descriptors_like(x) -> Callable[[int], Any]:
    """The descriptor ``x`` at another address. Descriptors of the latest addresses are cached."""
    like = copy.copy(x)
    like.base = None

    @functools.lru_cache(maxsize=256)
    def at(address: int):
        one = copy.copy(like)
        one.base = SimpleNamespace(data_ptr=lambda: address)
        return one

    return at
