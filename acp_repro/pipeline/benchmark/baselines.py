"""Other attention kernels, each behind one signature: ``call(q, k, v, log_fgate, threshold)``.

Tensors are (B, H, T, D), log_fgate (B, H, T) float32, threshold (B, H), "auto", or None for exact attention.
A baseline that is not installed, or cannot run here, is left out with the reason.
"""

from __future__ import annotations

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
from .timing import device_ms

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | str | None], Tensor]


class Baseline(NamedTuple):
    load: Callable[[], Attend]  # raises ImportError where it is not installed
    methods: tuple[str, ...]  # "acp", "acp auto" (U from norms), "exact", or "no gates"
    needs_gpu: bool = True


def available(name: str, device: torch.device) -> Attend | str:
    """The baseline's call, or one line on why there is none."""
    baseline = BASELINES[name]
    if baseline.needs_gpu and device.type != "cuda":
        return "needs a CUDA GPU"
    try:
        return baseline.load()
    except ImportError as error:
        return f"not installed ({error})"


def _ours(q, k, v, log_fgate, threshold):
    return forgetting_attention(q, k, v, log_fgate, head_first=True, adaptive_threshold=threshold)


def _eager(q, k, v, log_fgate, threshold):
    return equations(q, k, v, log_fgate, sm_scale=q.shape[-1] ** -0.5)[0]


def _cudnn(q, k, v, log_fgate, threshold):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def find_official() -> Callable[..., Tensor]:
    """The authors' ``forgetting_attention``."""
    for module in ("forgetting_transformer.ops.forgetting_attention", "forgetting_transformer"):
        try:
            return importlib.import_module(module).forgetting_attention
        except (ImportError, AttributeError) as error:
            missing = error
    raise ImportError(missing)


def _official() -> Attend:
    call = find_official()

    def attend(q, k, v, log_fgate, threshold):
        options = {} if threshold is None else {"adaptive_threshold": threshold}
        return call(q, k, v, log_fgate, head_first=True, sm_scale=q.shape[-1] ** -0.5, **options)

    return attend


def official_model(config: FoXConfig) -> nn.Module:
    """The authors' model, whose config has fields of the same names."""
    theirs = importlib.import_module("forgetting_transformer.model.forgetting_transformer")
    values = dataclasses.asdict(config)
    return theirs.ForgettingTransformerForCausalLM(theirs.ForgettingTransformerConfig(**values))


@torch.no_grad()
def decode_officially(model: nn.Module, prompt: Tensor, repeats: int) -> tuple[float, float, dict]:
    """Milliseconds of the prefill and of a step of the authors' model; nothing of the memory of its cache."""
    kind = importlib.import_module("transformers.cache_utils").Cache
    made: list[Any] = []
    # Transformers 5 asks its cache for arguments that theirs, which replaces all of it, does not give.
    no_arguments = unittest.mock.patch.object(kind, "__init__", lambda self: None)
    with no_arguments, torch.autocast(prompt.device.type, torch.bfloat16):
        # Without the logits of every place, which would not fit.
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
    """FlashAttention-4's kernels in CuTe, without gates; gradients as by default, summed in no fixed
    order."""
    try:
        call = importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError as error:  # of its package, or of one that it needs, such as `cutlass`
        raise ImportError(f"{error}: pip install flash-attn-4") from error

    def attend(q, k, v, log_fgate, threshold):
        out = call(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=q.shape[-1] ** -0.5, causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def _flex() -> Attend:
    """FlexAttention on blocks of 128, which is also the grid that it prunes on.

    It is used as its documentation says: compiled, with the list of blocks to compute. The list comes from
    where each row begins (``BlockMask.from_kv_blocks``), so that no matrix of length x length is ever held.
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
        # Of row m: blocks n_m .. m - 1 whole, block m cut by the diagonal.
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
        own = c.detach()  # the softmax ignores a row's shift, so no gradient is lost

        def decay(score, b, h, i, j):
            return score + (own[b, h, i] - c[b, h, j])

        return compiled(q, k, v, score_mod=decay, block_mask=mask)

    return attend


# One for every length and batch, with gradients and without: a user needs one or two of these, a table
# dozens.
_COMPILED_VARIANTS = 256


@functools.cache
def _compiled(function, **options):
    """``function`` compiled separately for each shape, or an error.

    PyTorch stops compiling at eight variants and runs further ones uncompiled. For FlexAttention that holds
    all scores at once: another algorithm, whose times would be recorded as the kernel's.
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
