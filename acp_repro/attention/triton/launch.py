"""Launches that are kept ready: what Triton finds out about a call is found out once for each shape.

``kernel[grid](...)`` costs the host 30 to 100 microseconds. Triton binds, specialises, looks up and describes
the arguments at every call. A pass of attention has four such calls. A pass that only allocates and launches
does the same each time for the same shapes, strides and alignments. Only the addresses of its tensors differ.
So :func:`ready` runs such a function once. It notes what the function allocates and what Triton gives its
launchers in C. Later calls give the launchers the same arguments with the new addresses.

Only what was seen while noting is repeated (:mod:`.notes`). Three things always run in the usual way: a pass
that calls an operator of PyTorch other than an allocation or a view, a kernel that needs scratch memory, and
a Triton that launches in a way unknown here. The same holds for calls that are watched: by hooks of
profilers, by modes of PyTorch, by Triton's interpreter. ``ACP_REPRO_PLAIN_LAUNCHES=1`` in the environment
runs every call in the usual way.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import notes
from .tiles import on_device_of

try:
    from triton import knobs
except ImportError:  # a Triton before 3.4: nothing is kept ready
    knobs = None

# Plans of each function, some ten kilobytes each; with one more all are forgotten.
MOST_PLANS = 1024
_SEEN = object()  # of a key: one call was made with it
_ready: list[Callable] = []


def launch(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """``kernel[grid](*arguments, **constants)`` on the device of the first tensor, noted where a
    :func:`ready` function is being noted."""
    with on_device_of(next(x for x in arguments if isinstance(x, Tensor))):
        compiled = kernel[grid](*arguments, **constants)
    noting = notes.current()
    if noting is not None:
        noting.add(kernel, compiled, grid, arguments, constants)


def ready(function: Callable) -> Callable:
    """``function(*tensors, constants)``, which allocates and launches, kept ready for its next calls.

    Args:
        function: takes tensors of one device or None, the first a tensor, and last a tuple of hashable
            constants on which everything else that it does depends. Returns a tuple of tensors that it
            allocated, or None.

    Returns:
        A function of the same arguments with the same results. The first call for each key (constants, and
        of each tensor shape, strides, dtype and alignment) runs ``function``, the second is noted too.
    """
    plans: dict[tuple, Any] = {}

    @functools.wraps(function)
    def call(*arguments):
        *tensors, constants = arguments
        if not can_be_ready(tensors[0]):
            return function(*arguments)
        device = tensors[0].device
        key, addresses = [device, constants], []
        for x in tensors:
            if x is None:
                key.append(None)
                addresses.append(0)
            else:
                address = x.data_ptr()
                key += x.shape, x.stride(), x.dtype, address % notes.ALIGNMENT
                addresses.append(address)
        key = tuple(key)
        plan = plans.get(key)
        if plan is None:
            # Compiles, if need be; and where no shape comes twice, noting would never pay.
            if len(plans) >= MOST_PLANS:
                plans.clear()
            plans[key] = _SEEN
        elif plan is _SEEN:
            noting = notes.Notes(tensors)
            results = noting.run(function, constants)
            plans[key] = noting.plan(results)
            return results
        elif plan.refused is None and not any(kernel.pre_run_hooks for kernel in plan.kernels):
            with on_device_of(tensors[0]):
                return plan(addresses, device)
        return function(*arguments)

    call.plans = plans
    _ready.append(call)
    return call


def forget() -> None:
    """Forgets all that is ready, for those who change what a pass launches."""
    for call in _ready:
        call.plans.clear()


def why_not_ready() -> list[str]:
    """What keeps passes that were noted from being repeated, one line for each that is not."""
    plans = [plan for call in _ready for plan in call.plans.values() if plan is not _SEEN]
    return [plan.refused for plan in plans if plan.refused is not None]


def can_be_ready(x: Tensor) -> bool:
    """Whether launches for ``x`` may go past Triton now: on an NVIDIA GPU, not switched off, and nobody looks
    on."""
    if os.environ.get("ACP_REPRO_PLAIN_LAUNCHES") == "1":
        return False
    return x.is_cuda and torch.version.hip is None and not _somebody_looks_on()


def _somebody_looks_on() -> bool:
    if knobs is None or torch._C._len_torch_dispatch_stack():
        return True
    runtime = knobs.runtime
    return bool(
        _calls(runtime.launch_enter_hook)
        or _calls(runtime.launch_exit_hook)
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or getattr(runtime, "add_stages_inspection_hook", None)
    )


def _calls(hook) -> Any:
    """What a launch hook calls: Triton has a chain of hooks, or in some versions one or None."""
    return hook if hook is None else getattr(hook, "calls", True)
