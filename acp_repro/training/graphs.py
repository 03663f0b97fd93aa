"""Forward and backward of a small model as one CUDA graph for each shape of its batches.

A step of a model of a few million weights is thousands of kernels of a few microseconds each. The host cannot
start them as fast as the GPU runs them. A graph is started as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

WARM_UPS = 2  # passes before a capture: libraries and the allocator set themselves up


class GraphedLoss:
    """Calls ``function`` through a CUDA graph for each shape of its arguments; the numbers are the same.

    The first output is differentiated; the others have no gradients. ``function`` may not depend on values
    that the host would have to read, or on random numbers.

    ``torch.cuda.make_graphed_callables`` cannot do this, for three reasons. It does not let the caller choose
    the mode of a capture; in its own mode, a capture fails if another thread pins memory for the next batch.
    It differentiates only the arguments of a function and the weights of a module, whose ``forward`` it
    replaces for one shape. It returns the graph's own memory for outputs and gradients, which the next shape
    overwrites.

    Args:
        function: tensors on one GPU -> a tuple of tensors, the first of them the loss, a scalar.
        model: the model that ``function`` calls; the loss is differentiated by its weights.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], model: nn.Module):
        self._function, self._model = function, model
        self._graphs: dict[tuple, _Graph] = {}
        self._pool = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of ``function``, in the same shapes and dtypes; the caller may keep them."""
        if _without:
            return self._function(*inputs)
        key = tuple((tuple(x.shape), x.dtype) for x in inputs)
        if key not in self._graphs:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[key] = _Graph(self._function, self._model, inputs, self._pool)
        return _Replay.apply(self._graphs[key], inputs, *self._model.parameters())


_without = 0


@contextlib.contextmanager
def without_graphs() -> Iterator[None]:
    """Inside, functions are called without graphs, so that hooks see their operations."""
    global _without
    _without += 1
    try:
        yield
    finally:
        _without -= 1


class _Graph:
    """One captured pass. Graphs share a pool, because no two run at once and their outputs are copied at
    once."""

    def __init__(self, function, model: nn.Module, inputs: tuple[Tensor, ...], pool):
        self.inputs = tuple(x.clone() for x in inputs)
        call = _Call(function, model)

        def run() -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
            # Otherwise autocast could use casts of older weights from its cache.
            dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
            with torch.enable_grad(), torch.autocast("cuda", dtype, enabled, cache_enabled=False):
                # Separate leaves: those of an eager pass that is still alive belong to another stream.
                weights = {name: p.detach().requires_grad_() for name, p in call.named_parameters()}
                outputs = torch.func.functional_call(call, weights, self.inputs)
                gradients = torch.autograd.grad(outputs[0], list(weights.values()), allow_unused=True)
            return tuple(x.detach() for x in outputs), gradients

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Another thread may pin memory for the next batch meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.outputs, self.gradients = run()

    def replay(self, inputs: tuple[Tensor, ...]) -> None:
        torch._foreach_copy_(list(self.inputs), list(inputs))
        self._graph.replay()


class _Call(nn.Module):
    """``function`` as the forward of a module that holds ``model``, so that its weights can be replaced."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], model: nn.Module):
        super().__init__()
        self.function, self.model = function, model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.function(*inputs)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph: _Graph, inputs: tuple[Tensor, ...], *parameters: Tensor):
        graph.replay(inputs)
        there = [g for g in graph.gradients if g is not None]
        copies = iter(torch._foreach_mul(there, 1.0))  # the next graph writes over these
        ctx.gradients = [None if g is None else next(copies) for g in graph.gradients]
        outputs = tuple(x.clone() for x in graph.outputs)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor, *_):
        there = [g for g in ctx.gradients if g is not None]
        torch._foreach_mul_(there, gradient)
        return None, None, *ctx.gradients
