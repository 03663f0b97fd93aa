"""Other attention kernels with a common signature: ``call(q, k, v, log_fgate, threshold)``.

Tensors are (B, H, T, D), log_fgate is (B, H, T) float32, and threshold is (B, H), "auto", or None for exact
attention. A baseline that is not installed or cannot run on this machine is skipped with the reason.
"""

import dataclasses
import functools
import importlib
import unittest.mock
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention import forgetting_attention
from ...attention.boundary import find_boundary
from ...attention.decay import cumulative_log_fgate
from ...attention.reference import forgetting_attention as equations
from ...model import FoXConfig
from ..errors import SuiteError
from .timing import device_ms

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | str | None], Tensor]


class Baseline(NamedTuple):
    load: Callable[[], Attend]  # raises ImportError or SuiteError if it is not installed
    methods: tuple[str, ...]  # "acp", "acp auto" (U from norms), "exact", or "no gates"
    needs_gpu: bool = True


def available(name: str, device: torch.device) -> Attend | str:
    """The function of the baseline, or one line with the reason why it is unavailable."""
    baseline = BASELINES[name]
    if baseline.needs_gpu and device.type != "cuda":
        return "needs a CUDA GPU"
    try:
        return baseline.load()
    except (ImportError, SuiteError) as error:
        return f"not installed ({error})"


def _ours(q, k, v, log_fgate, threshold):
    return forgetting_attention(q, k, v, log_fgate, head_first=True, adaptive_threshold=threshold)


def _eager(q, k, v, log_fgate, threshold):
    return equations(q, k, v, log_fgate, sm_scale=q.shape[-1] ** -0.5)[0]


def _cudnn(q, k, v, log_fgate, threshold):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _import_official(module: str) -> Any:
    """A module of the authors' package."""
    try:
        return importlib.import_module(f"forgetting_transformer.{module}")
    except ImportError as error:
        raise SuiteError(
            f"official: the authors' model and kernels cannot be imported ({error}); "
            "install github.com/zhixuan-lin/forgetting-transformer, or omit this option"
        ) from None


def find_official() -> Callable[..., Tensor]:
    """The authors' ``forgetting_attention``."""
    return _import_official("ops.forgetting_attention").forgetting_attention


def _official() -> Attend:
    call = find_official()

    def attend(q, k, v, log_fgate, threshold):
        return call(q, k, v, log_fgate, head_first=True, adaptive_threshold=threshold)

    return attend


def official_model(config: FoXConfig) -> nn.Module:
    """The authors' model, whose config has the same field names."""
    theirs = _import_official("model.forgetting_transformer")
    values = dataclasses.asdict(config)
    return theirs.ForgettingTransformerForCausalLM(theirs.ForgettingTransformerConfig(**values))


@torch.no_grad()
def decode_officially(model: nn.Module, prompt: Tensor, repeats: int) -> tuple[float, float, dict]:
    """Milliseconds of the prefill and of a step of the authors' model, without statistics of its cache."""
    made: list[Any] = []
    # In Transformers 5 the constructor of Cache has arguments that the authors' subclass does not pass.
    no_arguments = unittest.mock.patch("transformers.cache_utils.Cache.__init__", lambda self: None)
    with no_arguments, torch.autocast(prompt.device.type, torch.bfloat16):
        # Without the logits of all positions, which would not fit into memory.
        prefill_ms = device_ms(lambda: made.append(model.model(prompt, use_cache=True)), prompt.device)
        cache = made.pop().past_key_values
        step = functools.partial(model, prompt[:, :1], past_key_values=cache, use_cache=True)
        device_ms(lambda: [step() for _ in range(3)], prompt.device)
        total_ms = device_ms(lambda: [step() for _ in range(repeats)], prompt.device)
    return prefill_ms, total_ms / repeats, {}


def _fla() -> Attend:
    call = importlib.import_module("fla.ops.forgetting_attn").parallel_forgetting_attn

    def attend(q, k, v, log_fgate, threshold):
        out = call(*(x.transpose(1, 2) for x in (q, k, v, log_fgate)), scale=q.shape[-1] ** -0.5)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def _fa4() -> Attend:
    """FlashAttention-4's CuTe kernels, without gates; by default the order of gradient sums is not fixed."""
    try:
        call = importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError as error:  # of the package or a dependency, such as `cutlass`
        raise ImportError(f"{error}: pip install flash-attn-4") from error

    def attend(q, k, v, log_fgate, threshold):
        out = call(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=q.shape[-1] ** -0.5, causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def _flex() -> Attend:
    """FlexAttention with blocks of 128, which are also the grid for pruning.

    As its documentation recommends, it is compiled and has a list of the blocks to compute. The list is built
    from the boundary of each row (``BlockMask.from_kv_blocks``), so no length x length matrix is
    materialised.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    size = 128
    compiled = _compiled(flex_attention)

    def causal(b, h, i, j):
        return i >= j

    def attend(q, k, v, log_fgate, threshold):
        length = q.shape[2]
        c = cumulative_log_fgate(log_fgate)
        kept = find_boundary(c.detach(), threshold, length, size, size)
        rows = torch.arange(kept.shape[-1], dtype=torch.int32, device=q.device)
        # Row m has the full blocks n_m .. m - 1 and the partial block m on the diagonal.
        whole = (kept[..., None] + rows).clamp_(max=len(rows) - 1)
        diagonal = rows[:, None].expand(*kept.shape, len(rows)).contiguous()
        mask = BlockMask.from_kv_blocks(
            torch.ones_like(kept),
            diagonal,
            rows - kept,
            whole,
            BLOCK_SIZE=size,
            mask_mod=causal,
            seq_lengths=(length, length),
        )
        c = c.float()
        own = c.detach()  # softmax is invariant to a shift of a row, so its gradient is 0

        def decay(score, b, h, i, j):
            return score + (own[b, h, i] - c[b, h, j])

        return compiled(q, k, v, score_mod=decay, block_mask=mask)

    return attend


# A variant per length and batch, with and without gradients: a user needs one or two, a table needs dozens.
_COMPILED_VARIANTS = 256


@functools.cache
def _compiled(function, **options):
    """``function`` compiled separately for each shape; it raises an error if a shape cannot be compiled.

    By default PyTorch compiles eight variants and runs further ones uncompiled. Uncompiled FlexAttention
    materialises all scores, another algorithm, whose times would be recorded as the kernel's.
    """
    from torch._dynamo import config

    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(config, name, max(_COMPILED_VARIANTS, getattr(config, name)))
    return torch.compile(function, dynamic=False, fullgraph=True, **options)


BASELINES = {
    "ours": Baseline(lambda: _ours, ("acp", "acp auto", "exact"), needs_gpu=False),
    "official": Baseline(_official, ("acp", "acp auto", "exact")),
    "fla": Baseline(_fla, ("exact",)),
    "flex": Baseline(_flex, ("acp", "exact")),
    "fa4": Baseline(_fa4, ("no gates",)),
    "cudnn": Baseline(lambda: _cudnn, ("no gates",)),
    "eager": Baseline(lambda: _eager, ("exact",), needs_gpu=False),
}
