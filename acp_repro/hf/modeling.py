"""FoX as a model of transformers. Its modules and tensor names are those of ``FoXForCausalLM``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from acp_repro.model import FoXModel
from acp_repro.model.layers import Linear

from .configuration import MEANINGLESS_IDS, ForgettingTransformerConfig
from .packing import find_documents
from .past import ForgettingTransformerCache

_MOST_LISTED = 10
# Keywords that tell FoX nothing: the longest packed document, and where new tokens go in a cache.
_SAY_NOTHING = {"max_length_q", "max_length_k", "cache_position"}


class ForgettingTransformerForCausalLM(PreTrainedModel, GenerationMixin):
    """FoX with its language-model head, for ``AutoModelForCausalLM``, ``Trainer`` and ``generate``."""

    config_class = ForgettingTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FoXBlock"]  # noqa: RUF012

    def __init__(self, config: ForgettingTransformerConfig):
        super().__init__(config)
        fox = config.to_fox()
        self.model = FoXModel(fox)
        self.lm_head = Linear(fox.hidden_size, fox.vocab_size, fox.initializer_range)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As in transformers, but tensors that do not fit raise an error instead of being initialised at
        random.

        Raises:
            ValueError: tensors are missing, unexpected or of another shape; the message lists them.
        """
        with_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(
            pretrained_model_name_or_path,
            *model_args,
            **{**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True},
        )
        problems = [
            *(f"missing {name}" for name in sorted(info["missing_keys"])),
            *(f"unexpected {name}" for name in sorted(info["unexpected_keys"])),
            *(
                f"{name} has shape {tuple(there)}, should be {tuple(here)}"
                for name, there, here in sorted(info["mismatched_keys"])
            ),
        ]
        if problems:
            more = len(problems) - _MOST_LISTED
            shown = problems[:_MOST_LISTED] + ([f"and {more} more"] if more > 0 else [])
            raise ValueError(f"{pretrained_model_name_or_path} does not fit its config: {'; '.join(shown)}")
        told = model.generation_config
        if (told.bos_token_id, told.eos_token_id) == MEANINGLESS_IDS:  # taken from config.json unchanged
            told.bos_token_id, told.eos_token_id = model.config.bos_token_id, model.config.eos_token_id
        return (model, info) if with_info else model

    def _init_weights(self, module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, as transformers names it."""
        return self.model.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding."""
        self.model.embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        """The language-model head, as transformers names it."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the language-model head."""
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ForgettingTransformerCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits, and the mean loss if there are labels.

        Args:
            input_ids: (B, T) integer; with a cache, the tokens after the cached ones.
            attention_mask: (B, cached + T) of 0 and 1. Zeros are padding: on the left, or on the right of
                rows that nothing follows.
            position_ids: FoX has no positions. Where they start with 0 again, in a batch of one, a packed
                document starts. ``cu_seq_lens_q``, ``cu_seq_lens_k`` and ``seq_idx`` say the same. Each
                document gives what it gives alone. Packed documents have no cache.
            past_key_values: continue after what it holds, and extend it in place.
            labels: (B, T) integer, the ids of input_ids. They are shifted inside and -100 is left out, as in
                transformers.
            use_cache: return a cache; by default ``config.use_cache`` if no gradients are recorded.
            logits_to_keep: give only this many last logits, or those at these indices; 0 gives all.
            **kwargs: keywords for packed documents, and ``num_items_in_batch``, by which the sum of losses is
                divided.

        Returns:
            logits (B, T, vocab) in the dtype of the head's product; loss, a scalar in nats.

        Raises:
            TypeError: a keyword is not one of these.
            ValueError: the cache is of another kind or model, or a row has padding inside or between cached
                and new tokens. Also if ``position_ids`` are no count, and if attention weights are requested,
                because no kernel here holds them.
        """
        if output_attentions:
            raise ValueError("output_attentions is not supported: the kernels never hold the weights")
        documents = find_documents(input_ids, attention_mask, past_key_values, position_ids, kwargs)
        num_items = kwargs.pop("num_items_in_batch", None)
        unused = [name for name, value in kwargs.items() if value is not None and name not in _SAY_NOTHING]
        if unused:
            raise TypeError(f"forward has no use for {', '.join(unused)}")
        if past_key_values is None and self._wants_cache(use_cache, documents is not None):
            past_key_values = ForgettingTransformerCache(self.config)
        seq_start = self._padding(attention_mask, input_ids, past_key_values)
        states: list[Tensor] = []
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        with _watching(self.model.layers if output_hidden_states else (), states):
            cache = None if past_key_values is None else past_key_values.fox
            hidden = self.model(input_ids, cache, seq_start, documents)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items
            )
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=(*states, hidden) if output_hidden_states else None,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _wants_cache(self, use_cache: bool | None, packed: bool) -> bool:
        if use_cache is not None:
            return use_cache
        return self.config.use_cache and not torch.is_grad_enabled() and not packed

    def _padding(self, mask: Tensor | None, input_ids: Tensor, cache) -> Tensor | None:
        """(B,) the first real token of left-padded rows, or None."""
        held = 0
        if cache is not None:
            if not isinstance(cache, ForgettingTransformerCache):
                raise ValueError(
                    f"past_key_values must be a ForgettingTransformerCache, got {type(cache).__name__}: "
                    "no other cache holds gates and token shifts"
                )
            cache.check_model(self.config)
            held = cache.get_seq_length()
            if held and cache.right_padded:
                raise ValueError(
                    "the cached rows end with padding, so nothing can follow them: pad on the left "
                    "(tokenizer.padding_side = 'left')"
                )
        if mask is not None and held and not bool(mask[:, held:].all()):
            raise ValueError(
                "attention_mask has zeros after the cached tokens, where no row may have padding"
            )
        if mask is None or held:  # the cache remembers the padding
            return None
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, got "
                f"{tuple(mask.shape)}; masks with more dimensions do not apply to FoX"
            )
        real = mask.bool()
        start = real.int().argmax(-1)
        changes = real[:, 1:] != real[:, :-1]
        # Padding, text and padding again is allowed. More changes mean a hole in the text.
        allowed = (start > 0).int() + (~real[:, -1]).int()
        if bool((changes.sum(-1) > allowed).any()):
            raise ValueError("attention_mask has zeros between ones; only the ends of a row may be padding")
        if cache is not None:
            cache.right_padded = bool((~real[:, -1]).any())
        return start if bool((start > 0).any()) else None

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """Makes our cache. The one that transformers would make here does not hold forget gates."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported: FoX has "
                "a cache of its own (ForgettingTransformerCache)"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            # Drafts may run past the end before they are removed.
            drafts = generation_config.is_assistant or generation_mode == GenerationMode.ASSISTED_GENERATION
            cache = ForgettingTransformerCache(self.config, None if drafts else max_cache_length)
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs["past_key_values"] = cache


@contextlib.contextmanager
def _watching(layers, states: list[Tensor]) -> Iterator[None]:
    """While open, appends the inputs of each of ``layers`` to ``states``."""
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])) for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
