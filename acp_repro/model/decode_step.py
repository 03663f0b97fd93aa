"""One token for every row: the model from token ids to logits, on a GPU as one CUDA graph.

A step of a small model is hundreds of small kernels, and launching these kernels costs more time than running
them. A graph launches them together. Everything that changes from step to step is in tensors that keep their
address. Storage moves only between steps, when a pool grows; the graph is then captured again.
"""

import threading

import torch
from torch import Tensor

from acp_repro.attention import choose_implementation

from .cache import FoXCache
from .modules import is_watched

# A thread holds this lock while it captures, replays or draws random numbers. PyTorch captures all graphs on
# one stream after a synchronisation of the device, and some versions reject random numbers of all threads
# meanwhile.
CAPTURING = threading.Lock()


class DecodeStep:
    """Feeds tokens to a model that continues from a cache with the prompt; ``captures`` counts the captured
    graphs.

    Steps run without a graph if the cache has no ``max_length`` (delta changes with every token), while it
    records its past (which grows), and if a module has hooks (which a graph would not call).
    """

    def __init__(self, model, cache: FoXCache):
        self.model, self.cache = model, cache
        self.captures = 0
        self._watched = is_watched(*model.modules())
        self._graph: torch.cuda.CUDAGraph | None = None
        self._version: tuple[int, ...] | None = None
        self._tokens: Tensor | None = None
        self._logits: Tensor | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (B, vocab) float32 after ``tokens`` (B,) int64. The next call may overwrite them."""
        changes = self._watched or self.cache.max_length is None or self.cache.recording
        if changes or choose_implementation(tokens.device) != "triton":
            return self._run(tokens)
        if self._tokens is None:
            # The first step runs without a graph, because it compiles kernels and allocates workspaces.
            self._tokens = tokens.clone()
            return self._run(tokens)
        self._tokens.copy_(tokens)
        self.cache.reserve(1)
        with CAPTURING:
            if self._version != self.cache.version:
                self._capture(self._tokens)
            assert self._graph is not None and self._logits is not None
            self._graph.replay()
        self.cache.count(1)
        return self._logits

    def _run(self, tokens: Tensor) -> Tensor:
        hidden = self.model(tokens[:, None], cache=self.cache, return_hidden=True)
        return self.model.lm_head(hidden[:, -1]).float()

    def _capture(self, tokens: Tensor) -> None:
        self._graph = None  # frees its memory before the next capture
        graph = torch.cuda.CUDAGraph()
        device = tokens.device.type
        # Otherwise the cached casts of autocast would be freed at its end, and the graph would read freed
        # memory.
        autocast = torch.autocast(
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=False,
        )
        # Another thread may allocate memory during the capture.
        with autocast, torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._logits = self._run(tokens)
        self.cache.count(-1)  # the capture itself computed no token
        self._graph, self._version = graph, self.cache.version
        self.captures += 1
