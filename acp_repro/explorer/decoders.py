"""Captures q and k of every attention layer of a FoX model or any causal decoder of transformers.

A function registered with ``AttentionInterface`` of transformers captures q and k, and sdpa computes the
output. BLOOM and MPT do not support this interface, so hooks call their projections. The T x T weights are
never materialised.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.common.errors import UsageError
from acp_repro.model.capture import AttentionInputs, watch_attention
from acp_repro.model.layers import ForgettingAttentionCore

NAME = "acp_repro"  # the name of the attention function in transformers
# Keyword arguments of attention that this module handles or that do not affect the weights.
_KNOWN = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "position_bias",
    "position_ids",
    "s_aux",
    "sliding_window",
    "use_cache",
}


class NotReadable(UsageError):
    """The model's attention cannot be read; the message is a one-line reason."""


@dataclass
class LayerInputs:
    """The inputs of one layer's attention scores. Tensors without B belong to the first sequence.

    Attributes:
        q: (B, H, T, D). k: (B, Hkv, T, D), after rotary embedding if any. values: (B, Hkv, T, V).
        scaling: factor of ``q.k``.
        softcap: replaces a score s by ``softcap * tanh(s / softcap)``; None for no cap.
        window_size: keys that a query sees, its own included; None for all.
        sinks: (H,) learned logits (gpt-oss): an additional term without a key in the softmax sum of every
            row; None for no sinks.
        c: (H, T) float64, the running sum of the log forget gates, or of ALiBi's slopes, by which a score
            falls per token of distance. None without decay.
        threshold: (H,) delta, if the model computes it (a Forgetting Transformer with pruning).
        score: returns the scores (Hkv, T) of a scorer of keys; None if only q and k are captured.
    """

    q: Tensor
    k: Tensor
    values: Tensor
    scaling: float
    softcap: float | None = None
    window_size: int | None = None
    sinks: Tensor | None = None
    c: Tensor | None = None
    threshold: Tensor | None = None
    score: Callable[[Any], Tensor] | None = None


def read_layers(
    model: nn.Module, input_ids: Tensor, on_layer: Callable[[int, LayerInputs], None]
) -> list[str]:
    """Runs ``model`` on ``input_ids`` (B, T) int64 and calls ``on_layer(layer, inputs)`` for each attention.

    The model runs in evaluation mode; the mode of each module is restored afterwards.

    Returns:
        One line for each skipped layer, with the reason.

    Raises:
        NotReadable: no attention layer of the model can be read, or one computes its weights in an
            unsupported way; or the model has fewer positions than tokens.
    """
    decoder = cast(Any, model)
    layers: set[int] = set()
    skipped: dict[int, str] = {}

    def read_layer(layer: int, inputs: LayerInputs) -> None:
        layers.add(layer)
        on_layer(layer, inputs)

    in_transformers = hasattr(model, "base_model")
    run = functools.partial(decoder.base_model, use_cache=False) if in_transformers else decoder.model
    modes = {module: module.training for module in model.modules()}
    if any(isinstance(module, ForgettingAttentionCore) for module in modes):

        def read_fox(layer: int, inputs: AttentionInputs) -> None:
            own = LayerInputs(inputs.q, inputs.k, inputs.v, inputs.q.shape[-1] ** -0.5)
            if not decoder.config.use_rope:  # the RoPE baseline has no gates, and its log_fgate is 0
                own.c = cumulative_log_fgate(inputs.log_fgate[:1])[0]
                if inputs.threshold is not None:
                    own.threshold = inputs.threshold.expand(inputs.q.shape[:2])[0]
            read_layer(layer, own)

        watch = watch_attention(model, read_fox)
    else:
        config, length = text_config(model), input_ids.shape[1]
        own = {"mpt": "max_seq_len", "bloom": ""}.get(config.model_type)  # BLOOM has no limit
        limit = getattr(config, "max_position_embeddings" if own is None else own, None)
        if limit and length > limit:
            raise NotReadable(
                f"{length} tokens are more than the model's {limit} positions; reduce --context-length"
            )
        watch = _watch(model, read_layer, skipped)
    model.eval()
    try:
        with watch, torch.no_grad():
            run(input_ids)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not layers:
        whys = [*_lines(skipped), "it calls no attention function of transformers"]
        raise NotReadable(f"{type(model).__name__} cannot be read: {whys[0]}")
    for layer in {*range(getattr(model.config, "num_hidden_layers", 0))} - layers:
        skipped.setdefault(layer, "no softmax attention over tokens")
    return _lines(skipped)


def _lines(skipped: dict[int, str]) -> list[str]:
    return [f"layer {layer}: {why}" for layer, why in sorted(skipped.items())]


def text_config(model: nn.Module) -> Any:
    """The config of a FoX model, or of the text decoder in a model of transformers."""
    config = cast(Any, model.config)
    return getattr(config, "get_text_config", lambda: config)()


def load_decoder(path: str, device: torch.device) -> tuple[nn.Module, Any]:
    """Loads a causal decoder with transformers; returns the decoder and its tokenizer or None.

    Raises:
        UsageError: the decoder cannot be loaded; see :func:`acp_repro.model.third_party.load_model`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from acp_repro.model.third_party import load_model

    model = load_model(AutoModelForCausalLM, path, dtype="auto")
    tokenizer = None
    with contextlib.suppress(OSError, ValueError, KeyError, ImportError):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return model.to(device).eval(), tokenizer


_watcher: ContextVar[Callable[..., None]] = ContextVar("watcher")


def _attend(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    """The attention function of transformers: calls the watcher and computes the output of a layer."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _watcher.get()(module, query, key, value, attention_mask, scaling, softcap, kwargs)
    sinks = kwargs.get("s_aux")
    if softcap is None and sinks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return _attend_in_rows(query, key, value, attention_mask, scaling, softcap, sinks), None


def _attend_in_rows(query, key, value, mask, scaling, softcap, sinks, rows: int = 256) -> Tensor:
    """(B, T, H, D): attention with a soft cap and sinks, which sdpa lacks, in chunks of rows."""
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    for first in range(0, query.shape[2], rows):
        own = slice(first, first + rows)
        out[:, :, own] = _weigh(query, key, mask, scaling, softcap, sinks, own) @ value
    return out.transpose(1, 2)


def _weigh(query, key, mask, scaling, softcap, sinks, own=slice(None)) -> Tensor:
    """(B, H, rows, T): the weights of the queries ``own`` by eager attention."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query[:, :, own] @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    places = torch.arange(query.shape[2], device=query.device)
    seen = places[own, None] >= places if mask is None else mask[:, :, own]
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[2]]


@contextlib.contextmanager
def _watch(
    model: Any, on_layer: Callable[[int, LayerInputs], None], skipped: dict[int, str]
) -> Iterator[None]:
    """A context that calls ``on_layer`` for each layer of a transformers decoder."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    given: dict[nn.Module, dict[str, Any]] = {}
    attended: set[int] = set()
    latest: list[Tensor] = []

    def handle(module, query, key, value, mask, scaling, softcap, kwargs) -> None:
        layer = getattr(module, "layer_idx", None)
        layer = len(given) if layer is None else layer
        if any(query is one for one in latest):
            return  # DiffLlama applies the same weights to both halves of its values
        latest[:] = [query]
        new = [n for n, v in kwargs.items() if n not in _KNOWN and v is not None and v is not False]
        if new or layer in attended:
            passes = f"passes {', '.join(new)} to its attention, whose weights then do not follow from q, k "
            why = passes + "and a mask" if new else "attends more than once, as a recurrent model does"
            raise NotReadable(
                f"{type(model).__name__} cannot be read: layer {layer} {why}; use another model"
            )
        attended.add(layer)
        if why := _why_not(module, query, key, mask, kwargs):
            skipped[layer] = why
            return
        on_layer(
            layer,
            LayerInputs(
                query,
                key,
                value,
                query.shape[-1] ** -0.5 if scaling is None else scaling,
                softcap,
                kwargs.get("sliding_window"),
                sinks=kwargs.get("s_aux"),
                score=functools.partial(
                    _score,
                    module,
                    given.get(module, {}),
                    key,
                    value,
                    functools.partial(_weigh, query, key, mask, scaling, softcap, kwargs.get("s_aux")),
                ),
            ),
        )

    def keep_arguments(module, args, kwargs):
        given[module] = dict(zip(("hidden_states",), args, strict=False)) | kwargs

    def read_alibi(module, args, kwargs):
        on_layer(*_alibi_inputs(module, inspect.signature(module.forward).bind(*args, **kwargs).arguments))

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    rotary = next((one for name, one in model.named_modules() if name.endswith("rotary_emb")), None)
    with contextlib.ExitStack() as stack:
        for module in [*model.modules()]:
            if type(module).__name__ in _ALIBI:
                hook = module.register_forward_pre_hook(read_alibi, with_kwargs=True)
            elif hasattr(module, "layer_idx"):
                hook = module.register_forward_pre_hook(keep_arguments, with_kwargs=True)
                if not hasattr(module, "rotary_emb"):  # where presses of kvpress expect it
                    module.rotary_emb = rotary
                    stack.callback(delattr, module, "rotary_emb")
            else:
                continue
            stack.callback(hook.remove)
        if model._can_set_attn_implementation():
            stack.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation(NAME)
        token = _watcher.set(handle)
        stack.callback(_watcher.reset, token)
        yield


def _score(module, kwargs, keys, values, weigh: Callable[[], Tensor], scorer) -> Tensor:
    """(Hkv, T) on the CPU: the scores of the first sequence, by the calling convention of kvpress."""
    score = functools.partial(scorer.score, module, kwargs["hidden_states"], keys, values)
    try:
        scores = score(None, kwargs)
    except AssertionError:  # ObservedAttentionPress of kvpress asserts that weights are passed
        scores = score(weigh(), kwargs)
    if scores.shape != keys.shape[:3]:
        raise NotReadable(f"a scorer must return shape {tuple(keys.shape[:3])}, got {tuple(scores.shape)}")
    return scores[0].float().cpu()


def _why_not(module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> str:
    """The reason why a call is not causal self-attention; empty if it is."""
    if q.shape[2] != k.shape[2]:
        return "has more or fewer keys than queries (cross-attention, or compressed keys)"
    if not getattr(module, "is_causal", True):
        return "sees later tokens (an encoder)"
    if kwargs.get("position_bias") is not None:
        return "has a learned bias of positions"
    if mask is None:
        return "sees later tokens" if kwargs.get("is_causal") is False else ""
    length, window = q.shape[2], kwargs.get("sliding_window") or q.shape[2]
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    seen = mask if mask.dtype == torch.bool else mask == 0
    return "" if (seen == ((distance >= 0) & (distance < window))).all() else "has a mask that is not causal"


def _bloom_qkv(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    return *module._reshape(module.query_key_value(hidden_states)), module.inv_norm_factor


def _mpt_qkv(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (x.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for x in qkv.chunk(3, -1))
    return q, k, v, module.softmax_scale


_ALIBI = {"BloomAttention": ("alibi", _bloom_qkv), "MptAttention": ("position_bias", _mpt_qkv)}


def _alibi_inputs(module: Any, arguments: dict[str, Any]) -> tuple[int, LayerInputs]:
    name, project = _ALIBI[type(module).__name__]
    hidden_states, bias = arguments["hidden_states"], arguments[name]
    q, k, values, scaling = project(module, hidden_states)
    # Linear in the key's position: (B * H, 1, T) in BLOOM, (H, 1, longest) in MPT.
    slopes = (bias[:, 0, -1] - bias[:, 0, 0])[: q.shape[1]].double() / (bias.shape[-1] - 1)
    c = -slopes[:, None] * torch.arange(q.shape[2], device=q.device)
    return module.layer_idx, LayerInputs(q, k, values, scaling, c=c)
