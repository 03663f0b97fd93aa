"""The registry of encoders: the paths to their blocks, and the call of one block."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutput

from acp_repro.common.errors import did_you_mean

from .config import LIKE_BERT

# Encoders whose position ids start at 2.
LIKE_ROBERTA = ("roberta", "longformer", "camembert", "xlm-roberta")


@dataclasses.dataclass(frozen=True)
class Encoder:
    """The paths in an encoder of transformers to the modules that retention needs.

    Attributes:
        stack: path from the base model (without the head) to the module whose forward runs the blocks.
        layers: path from there to the list of blocks.
        query, key: paths from a block to its query and key projections, to compute received attention.
        windowed: whether attention is local. Cost and window then depend on the remaining tokens, so kept
            tokens are made contiguous even if the others are only masked.
        call: runs a block as ``call(block, hidden, mask, **kwargs)`` and may return a tuple. None means
            ``block(hidden, mask, **kwargs)``.
        output: the class of transformers that the stack's forward returns.
    """

    stack: str
    query: str
    key: str
    layers: str = "layer"
    windowed: bool = False
    call: Callable[..., Tensor] | None = None
    output: type = BaseModelOutputWithPastAndCrossAttentions

    def find_stack(self, model: nn.Module) -> nn.Module:
        """The module whose forward runs the blocks, in a model with or without a head."""
        base = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
        return base.get_submodule(self.stack)

    def find_layers(self, stack: nn.Module) -> nn.ModuleList:
        """The blocks."""
        return cast(nn.ModuleList, stack.get_submodule(self.layers))

    def run(self, block: nn.Module, hidden: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
        """One block's output, (B, T, D) in the dtype of ``hidden`` (B, T, D)."""
        call = self.call or (lambda block, *given, **kwargs: block(*given, **kwargs))
        out = call(block, hidden, mask, **kwargs)
        return out[0] if isinstance(out, tuple) else out


def position_limit(config: Any) -> int:
    """The number of position embeddings for tokens in an encoder of one of ``MODEL_TYPES``."""
    return config.max_position_embeddings - 2 * (config.model_type in LIKE_ROBERTA)


def register_encoder(model_type: str, encoder: Encoder) -> None:
    """Registers an encoder for :func:`~acp_repro.retention.retain` under its config's ``model_type``.

    register_encoder("electra", Encoder("encoder", "attention.self.query", "attention.self.key"))
    """
    _KNOWN[model_type] = encoder


def find_encoder(model: nn.Module) -> Encoder:
    """The description of a model's encoder.

    Raises:
        ValueError: the model type is not registered, or the registered paths do not lead to the blocks.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in _KNOWN:
        raise ValueError(
            f"model type {model_type!r} is not registered{did_you_mean(model_type, _KNOWN)}; call "
            f"register_encoder, or use one of {', '.join(sorted(_KNOWN))}"
        )
    encoder = _KNOWN[model_type]
    try:
        block = encoder.find_layers(encoder.find_stack(model))[0]
        _ = block.get_submodule(encoder.query), block.get_submodule(encoder.key)
    except AttributeError as error:
        raise ValueError(f"{type(model).__name__}: {error}; correct its register_encoder") from None
    if getattr(model.config, "is_decoder", False):
        raise ValueError("this model is a decoder; retention supports encoders only")
    return encoder


# ---- attention received -----------------------------------------------------------------------

_MOST_WEIGHTS = 1 << 25  # attention weights that are materialised at once


def attention_received(
    encoder: Encoder,
    block: nn.Module,
    hidden: Tensor,
    valid: Tensor,
    heads: int,
    global_: Tensor | None = None,
) -> Tensor:
    """The attention that each token receives in a block, summed over heads and queries: (B, T) float32.

    The weights are recomputed from the block's projections, because fused attention does not return them.
    Queries are processed in chunks, so that no matrix of T x T weights is materialised.

    Args:
        hidden: (B, T, D), the input of the block.
        valid: (B, T) bool: False for padding, which neither attends nor is attended to.
        heads: attention heads of the block.
        global_: (B, T) bool, for a windowed encoder: tokens with global attention.
    """
    query, key = block.get_submodule(encoder.query), block.get_submodule(encoder.key)
    received = hidden.new_zeros(valid.shape, dtype=torch.float32)
    if encoder.windowed:
        _add_windowed(received, block, query, key, hidden, valid, heads, global_)
        return received
    q, k = _split_heads(query, key, hidden, heads)
    bias = torch.zeros(valid.shape, device=hidden.device).masked_fill(~valid, -torch.inf)[:, None, None]
    attends = valid.float()[:, None, None]
    step = max(1, _MOST_WEIGHTS // (q.shape[0] * heads * q.shape[2]))
    with torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, q.shape[2], step):
            logits = (q[:, :, first : first + step] @ k.mT).float() * q.shape[-1] ** -0.5
            weights = torch.softmax(logits.add_(bias), -1)
            received += (attends[..., first : first + step] @ weights).sum((1, 2))
    return received


def _split_heads(query: nn.Module, key: nn.Module, hidden: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    q, k = (f(hidden).unflatten(-1, (heads, -1)).transpose(1, 2) for f in (query, key))
    return q, k


def _add_windowed(received, block, query, key, hidden, valid, heads, global_) -> None:
    """Longformer: local queries attend to their window and the global tokens, global queries to all."""
    attention = block.attention.self
    at = torch.arange(hidden.shape[1], device=hidden.device)
    near = (at[:, None] - at).abs() <= attention.one_sided_attn_window_size
    for queries, keys, asks, seen in (
        (query, key, valid & ~global_, (near | global_[:, None]) & valid[:, None]),
        (attention.query_global, attention.key_global, valid & global_, valid[:, None]),
    ):
        # One head at a time, because this path materialises a matrix of T x T weights.
        for q, k in zip(*(x.unbind(1) for x in _split_heads(queries, keys, hidden, heads)), strict=True):
            logits = (q @ k.mT).float() * q.shape[-1] ** -0.5
            weights = torch.softmax(logits.masked_fill(~seen, torch.finfo(torch.float32).min), -1)
            received += (weights * asks[:, :, None]).sum(1)


# ---- registered encoders ----------------------------------------------------------------------


def _call_longformer(block: nn.Module, hidden: Tensor, mask: Tensor, **kwargs: Any) -> Any:
    """Calls a Longformer block; its mask is 0 for local attention, positive for global, negative for none."""
    is_global = mask > 0
    return block(
        hidden,
        attention_mask=mask,
        is_index_masked=mask < 0,
        is_index_global_attn=is_global,
        is_global_attn=bool(is_global.any()),
    )


_BERT = Encoder("encoder", "attention.self.query", "attention.self.key")
_KNOWN = {
    **dict.fromkeys(LIKE_BERT, _BERT),
    "distilbert": Encoder("transformer", "attention.q_lin", "attention.k_lin", output=BaseModelOutput),
    "longformer": dataclasses.replace(
        _BERT, windowed=True, call=_call_longformer, output=LongformerBaseModelOutput
    ),
}
