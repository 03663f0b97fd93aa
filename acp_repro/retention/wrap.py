"""``retain`` adds a token budget to an encoder of transformers; its arguments and outputs stay the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor, nn

from acp_repro.model.third_party import load_config, load_model

from .config import MODEL_TYPES, RetentionConfig
from .encoders import find_encoder, position_limit
from .forward import run
from .retention import Call, Retention

_PREFIX = "Retained"


def retain(
    model: transformers.PreTrainedModel, config: RetentionConfig, teacher: nn.Module | None = None
) -> RetainedModel:
    """Adds gates to an encoder of transformers, in place, and returns the model.

    The gates adopt the encoder's mode (training or evaluation), dtype and device; lambda stays float32. The
    model's arguments and outputs are unchanged; outputs keep the original positions. One argument is new:
    ``protected_mask``, (B, T) bool, marks additional tokens that are never dropped. If ``labels`` are
    passed, the training loss includes the budget's penalty (Eq. 5).

    Args:
        model: a model of transformers, with or without a head; its weights do not change.
        config: the settings of the gates.
        teacher: the dense model from which method ``top`` is distilled, frozen. It is not saved with the
            weights, and is moved to the model's device in training.

    Returns:
        ``model``.

    Raises:
        ValueError: the encoder is not registered (see ``register_encoder``), its number of blocks differs
            from the config, or it already has gates.
    """
    if isinstance(model, RetainedModel):
        raise ValueError("the model already has gates; load the dense one, or use model.retention.configure")
    if config.gate_keys and find_encoder(model).windowed:
        raise ValueError("gate_keys: windowed attention supports no bias; set gate_keys=False")
    _attach(model, config)
    model.config.retention = config.as_dict()
    model.__class__ = retained_class(type(model))
    if teacher is not None:
        teacher.eval().requires_grad_(False)
    vars(model)["_teacher"] = teacher  # not a submodule, because its weights are not ours
    return cast(RetainedModel, model)


def from_pretrained(folder: str | Path, **options: Any) -> RetainedModel:
    """Loads a retained model that ``save_pretrained`` wrote, with its gates and their settings.

    Args:
        folder: a folder, or a name on the Hub.
        options: options of transformers' ``from_pretrained``, such as ``dtype``.

    Raises:
        ValueError: the folder does not exist or contains no retained model, or its weights are damaged or do
            not match its config (see :func:`acp_repro.model.third_party.load_model`).
    """
    config = load_config(folder)
    name = (config.architectures or [""])[0]
    if getattr(config, "retention", None) is None or not name.startswith(_PREFIX):
        raise ValueError(f"{folder}: the model has no gates; load it with transformers and call retain")
    base = getattr(transformers, name.removeprefix(_PREFIX))
    return load_model(retained_class(base), folder, **options)


class _MadeClass:
    """Mixin that pickles instances of a run-time class as ``make(base)``, from ``_origin = (make, base)``."""

    _origin: tuple[Callable[[type], type], type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return _new_instance, self._origin, *state


def _new_instance(make: Callable[[type], type], base: type) -> Any:
    made: Any = make(base)
    return made.__new__(made)


class RetainedModel(_MadeClass, transformers.PreTrainedModel if TYPE_CHECKING else object):
    """The attributes that a retained model adds to those of its base class."""

    @property
    def retention(self) -> Retention:
        """The gates."""
        return cast(Any, find_encoder(self).find_stack(self)).retention


@functools.cache
def retained_class(base: type) -> type:
    """``base`` with gates; its ``from_pretrained`` reads their settings from ``config.retention``."""
    signature = inspect.signature(base.forward)
    names = list(signature.parameters)[1:]

    def __init__(self, config, *args, **kwargs):
        super(made, self).__init__(config, *args, **kwargs)
        _attach(self, RetentionConfig.from_dict(config.retention))

    @functools.wraps(base.forward)
    def forward(self, *args, protected_mask: Tensor | None = None, **kwargs):
        retention = self.retention
        if not retention.places:
            return base.forward(self, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        _refuse_states_of_blocks(self, retention, given)
        tokens = _check_tokens(self, given, protected_mask)
        # The masks are computed after the embeddings, which keep a GPU busy while the host launches them.
        with retention.hold_call(lambda: _find_tokens(self, retention, tokens, given, protected_mask)):
            output = base.forward(self, *args, **kwargs)
        if self.training and retention.penalty is not None:
            output = _add_penalty(self, output, given)
        return output

    # Trainer passes only columns that are named in the signature.
    new = inspect.Parameter("protected_mask", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = sorted([*signature.parameters.values(), new], key=lambda parameter: parameter.kind)
    cast(Any, forward).__signature__ = signature.replace(parameters=parameters)
    members = {"__init__": __init__, "forward": forward, "_origin": (retained_class, base)}
    # transformers looks up the recordable outputs of a class's blocks by its qualified name.
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    made: Any = type(f"{_PREFIX}{base.__name__}", (RetainedModel, base), members)
    return made


def _attach(model: Any, config: RetentionConfig) -> None:
    encoder = find_encoder(model)
    stack: Any = encoder.find_stack(model)
    layers = encoder.find_layers(stack)
    retention = Retention(config, encoder, model.config, len(layers))
    weight = next(stack.parameters())
    stack.retention = retention.to(device=weight.device) if weight.device.type != "meta" else retention
    cast(Any, retention.gates).to(dtype=model.dtype)  # lambda stays float32: its steps round to 0 in bfloat16
    retention.train(stack.training)
    stack.__class__ = _retained_stack(type(stack))


@functools.cache
def _retained_stack(base: type) -> type:
    def forward(self, hidden_states, attention_mask=None, *args, **kwargs):
        retention = self.retention
        if not retention.places:
            return base.forward(self, hidden_states, attention_mask, *args, **kwargs)
        padding = kwargs.pop("padding_len", 0)
        as_tuple = kwargs.pop("return_dict", True) is False
        for name in ("output_attentions", "output_hidden_states"):
            kwargs.pop(name, None)  # hooks of transformers collect them
        layers = retention.encoder.find_layers(self)
        hidden = run(retention, layers, hidden_states, attention_mask, kwargs)
        hidden = hidden[:, : hidden.shape[1] - padding]
        return (hidden,) if as_tuple else retention.encoder.output(last_hidden_state=hidden)

    members = {"forward": forward, "_origin": (_retained_stack, base)}
    return type(f"{_PREFIX}{base.__name__}", (_MadeClass, base), members)


def _refuse_states_of_blocks(model: RetainedModel, retention: Retention, given: dict[str, Any]) -> None:
    """Raises ValueError if argument or config request states or attentions that cannot be returned."""
    gathers = retention.phase == "hard" and retention.config.removal == "gather"
    # Encoders such as Longformer's collect them in their own loop over the blocks, which gates replace.
    if not gathers and getattr(model.base_model, "_can_record_outputs", None):
        return
    for name in ("output_hidden_states", "output_attentions"):
        value = given.get(name)
        if getattr(model.config, name, False) if value is None else value:
            raise ValueError(
                f"{name}: a pruned encoder has no attentions or hidden states to return here; use "
                "retention.recorded(), or call the model inside retention.disabled()"
            )


def _check_tokens(model: RetainedModel, given: dict[str, Any], protected_mask: Tensor | None) -> Tensor:
    """The token ids (B, T) or embeddings (B, T, D) of a call; ValueError if their shape cannot be used."""
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        raise ValueError("give either input_ids or inputs_embeds")
    tokens: Any = embeds if ids is None else ids
    shape = tokens.shape[:2]
    if 0 in shape:
        raise ValueError(f"a batch of {shape[0]} texts of {shape[1]} tokens is empty; remove it")
    if model.config.model_type in MODEL_TYPES and shape[1] > (limit := position_limit(model.config)):
        raise ValueError(f"{shape[1]} tokens are more than the model's {limit} positions; shorten the texts")
    for name, one in (("attention_mask", given.get("attention_mask")), ("protected_mask", protected_mask)):
        if one is not None and one.shape != shape:
            raise ValueError(f"{name}: must be {tuple(shape)}, one entry a token, got {tuple(one.shape)}")
    return tokens


def _find_tokens(
    model: RetainedModel,
    retention: Retention,
    tokens: Tensor,
    given: dict[str, Any],
    protected_mask: Tensor | None,
) -> Call:
    """The valid and the protected tokens of a call."""
    config, mask, ids = retention.config, given.get("attention_mask"), given.get("input_ids")
    valid = (
        tokens.new_ones(tokens.shape[:2], dtype=torch.bool) if mask is None else mask.to(tokens.device) > 0
    )
    # The first token that is not padding is [CLS], with left or right padding.
    protected = valid & (valid.cumsum(1) == 1)
    answers = type(model).__name__.endswith("ForQuestionAnswering")
    asks = config.protect == "question" or (config.protect == "auto" and answers)
    if asks:
        protected = protected | _find_question(model, config, ids, valid)
    if protected_mask is not None:
        protected = protected | (protected_mask.to(tokens.device).bool() & valid)
    return Call(valid, protected, ids, mask is None, asks or protected_mask is not None)


def _find_question(model: nn.Module, config: RetentionConfig, ids: Tensor | None, valid: Tensor) -> Tensor:
    """(B, T) bool: all tokens up to the first separator."""
    given, known = config.sep_token_id, getattr(model.config, "sep_token_id", None)
    separator = known if given is None else given
    if separator is None:
        raise ValueError("sep_token_id: set it in RetentionConfig to mark the end of the question")
    if ids is None:
        raise ValueError("protect: a question needs input_ids; with inputs_embeds pass protected_mask")
    is_end = (ids == separator) & valid
    return valid & (is_end.cumsum(1) - is_end.long() == 0) & is_end.any(1, keepdim=True)


def _add_penalty(model: RetainedModel, output: Any, given: dict[str, Any]) -> Any:
    """The output with the penalty, and ToP's distillation, added to its loss; unchanged if it has no loss."""
    as_tuple = isinstance(output, tuple)
    loss = output[0] if as_tuple else getattr(output, "loss", None)
    if loss is None or loss.dim() > 0:
        return output
    loss = loss + model.retention.penalty
    teacher = getattr(model, "_teacher", None)
    config = model.retention.config
    if teacher is not None and config.method == "top" and config.distillation_weight:
        loss = loss + config.distillation_weight * _distil(output, teacher.to(loss.device), given)
    if as_tuple:
        return (loss, *output[1:])
    output["loss"] = loss
    return output


def _distil(output: Any, teacher: nn.Module, given: dict[str, Any]) -> Tensor | float:
    """KL(teacher || model), a scalar: averaged over examples, summed over all logits of the head."""
    labels = ("labels", "start_positions", "end_positions")
    with torch.no_grad():
        taught = teacher(**{name: value for name, value in given.items() if name not in labels})
    total = 0.0
    for name in ("logits", "start_logits", "end_logits"):
        if not isinstance(output, tuple) and getattr(output, name, None) is not None:
            ours = nn.functional.log_softmax(getattr(output, name).float(), -1).flatten(0, -2)
            theirs = nn.functional.log_softmax(getattr(taught, name).float(), -1).flatten(0, -2)
            total = total + nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    return total
