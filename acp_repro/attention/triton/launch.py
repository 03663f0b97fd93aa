"""Launches that are kept ready: what Triton finds out about a call is found out once for each shape.

``kernel[grid](...)`` costs the host 30 to 100 microseconds, and a pass of attention has four such calls. A
pass that only allocates and launches does the same each time for the same shapes, strides and alignments.
Only the addresses of its tensors differ. So `repeat_launches` records the second run of such a function, and
later calls give Triton's compiled kernels the same arguments with the new addresses.

Triton's own way of launching serves wherever that could differ: in a pass that calls an operator of PyTorch
other than an allocation or a view; while a profiler or a mode of PyTorch looks on; and in a Triton whose
compiled kernels are called in another way. The logger of this module tells at level debug which passes are
not repeated, and why.
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

# Triton compiles a kernel for addresses that are multiples of this, and another for the rest.
ALIGNMENT = 16
# Plans of each function, some ten kilobytes each; with one more all are forgotten.
MOST_PLANS = 1024
_PIECE = 256  # where the pieces of one allocation start
_SEEN = object()  # of a key: one call was made with it
_STREAM = object()  # stands for the stream among recorded arguments
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
    """``kernel[grid](*arguments, **constants)`` on the device of the first tensor, recorded where a
    `repeat_launches` function is being recorded."""
    try:
        with enter_device(next(x for x in arguments if isinstance(x, Tensor))):
            compiled = kernel[grid](*arguments, **constants)
    except RuntimeError as error:
        if "C compiler" in str(error):  # with which Triton builds its launcher
            raise RuntimeError("Triton finds no C compiler: install gcc, or take 'blockwise'") from error
        raise
    recording = getattr(_thread, "recording", None)
    if recording is not None:
        recording.launches.append((kernel, compiled, grid, arguments, constants))


def repeat_launches(function: Callable) -> Callable:
    """``function(*tensors, constants)``, which allocates and launches, kept ready for its next calls.

    It takes tensors of one device or None, the first a tensor, and last a tuple of hashable constants on
    which all else that it does depends, and returns tensors that it allocated, whole, or None. The first call
    for each key (constants; layout, dtype, device, alignment of each tensor) runs it, the second is recorded.
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
            plans[key] = _SEEN  # where no shape comes twice, recording would never pay
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
    """Whether launches for ``x`` may go past Triton's binder now: on an NVIDIA GPU, and nobody looks on."""
    runtime = knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return x.is_cuda and not (
        torch.version.hip
        or torch._C._len_torch_dispatch_stack()
        or any(getattr(hook, "calls", hook) for hook in hooks)  # a chain, or one that a user has put there
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or find_portable_request()  # a kept call has the kernels that it was kept with
        or getattr(runtime, "add_stages_inspection_hook", None)
    )


def bind_arguments(kernel, compiled, grid, arguments, constants) -> tuple[Callable, list]:
    """A compiled kernel's own launcher, and all that Triton gives it, with a mark in the stream's place."""
    parameters = kernel.signature.parameters
    bound = kernel.signature.bind(*arguments, **{n: x for n, x in constants.items() if n in parameters})
    bound.apply_defaults()
    hooks = (None, None, None)  # the launch's metadata for profilers, what they call before and after
    sizes = (*grid, 1, 1)[:3]
    where = (*sizes, _STREAM, compiled.function, compiled.packed_metadata, *hooks)
    return compiled.run, [*where, *bound.arguments.values()]


class _Recording(TorchDispatchMode):
    """Sees every operator of PyTorch and every launch of one run of a function."""

    def __init__(self, tensors: list[Tensor | None]):
        super().__init__()
        # Another object for each, since the same tensor may be given twice and need not be next time.
        self.inputs = [None if x is None else x.detach() for x in tensors]
        self.allocated: list[Tensor] = []  # kept to the end, so that no address comes twice
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
        """What ``function`` returns, and how to repeat its launches; False if that cannot be done."""
        _thread.recording = self
        try:
            with self:
                results = function(*self.inputs, constants)
        finally:
            _thread.recording = None
        try:
            return results, Plan(self, results)
        except (LookupError, AttributeError, TypeError) as error:  # the last two: a Triton of another make
            _log.debug("%s is not repeated: %r", function.__qualname__, error)
            return results, False


class Plan:
    """A pass as its launches: what to allocate, and what to give each kernel."""

    # Everything that a kernel may be given stands in one list: the addresses of inputs, results and pieces of
    # scratch memory, the stream, what is made of an address; and from the end on constants.

    def __init__(self, recording: _Recording, results: tuple[Tensor | None, ...]):
        if recording.others:
            raise LookupError(f"it calls {recording.others[0]}")
        whole = {_extent(x): x for x in recording.allocated}
        made = [whole.pop(_extent(x)) for x in results if x is not None]  # what it did not allocate: KeyError
        pieces = list(whole.values())
        if any(x.data_ptr() % ALIGNMENT for x in recording.allocated):
            raise LookupError("memory that PyTorch allocated is not aligned")
        self.results = [None if x is None else (x.shape, x.stride(), x.dtype) for x in results]
        ends = accumulate(-(-x.untyped_storage().nbytes() // _PIECE) * _PIECE for x in pieces)
        *self.offsets, self.scratch = 0, *ends
        inputs, own = recording.inputs, [*made, *pieces]
        self._slots = {id(x): n for n, x in enumerate(inputs) if x is not None}
        # A view of an input is known by its address, if no other input has it.
        places = [None if x is None else x.data_ptr() for x in inputs]
        self._views = {at: n for n, at in enumerate(places) if places.count(at) == 1}
        self._own = {x.untyped_storage().data_ptr(): len(inputs) + n for n, x in enumerate(own)}
        self._stream = len(inputs) + len(own)
        self._places: dict[tuple, int] = {}
        self.derived: list[tuple[Callable[[int], Any], int]] = []  # each of the value at a place
        self.constants: list = []
        # A kernel is kept, since one that is dropped may take its function off the GPU.
        self.kernels = [compiled for _, compiled, *_ in recording.launches]
        self.launches = []
        for run, arguments in starmap(bind_arguments, recording.launches):
            self.launches.append((run, itemgetter(*map(self._place, arguments))))
        self.constants.reverse()

    def _place(self, x) -> int:
        """Where in the list of values this argument will stand."""
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
        """The pass on inputs at these addresses, on the current stream of the device, which is current."""
        results = [
            None if one is None else torch.empty_strided(*one[:2], dtype=one[2], device=device)
            for one in self.results
        ]
        values += [x.data_ptr() for x in results if x is not None]
        if self.scratch:
            # One allocation for all pieces. It is given back when the stream holds all launches.
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
    """What makes a tensor the whole of an allocation; PyTorch may show one as different objects and views."""
    return x.untyped_storage().data_ptr(), x.data_ptr(), x.numel(), x.dtype


def _descriptors_like(x) -> Callable[[int], Any]:
    """The descriptor ``x`` at another address. Those of the latest addresses are kept."""
    like = copy.copy(x)
    like.base = None

    @functools.lru_cache(maxsize=256)
    def at(address: int):
        one = copy.copy(like)
        one.base = SimpleNamespace(data_ptr=lambda: address)
        return one

    return at
