"""FoX as a model of transformers, with the modules and tensor names of ``FoXForCausalLM``."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from acp_repro.model import FoXModel
from acp_repro.model.layers import HeadRMSNorm, Linear
from acp_repro.model.pretrained import check_sum
from acp_repro.model.third_party import check_loaded

from .configuration import (
    MEANINGLESS_IDS,
    RIGHT_PADDING_ERROR,
    ForgettingTransformerCache,
    ForgettingTransformerConfig,
    check_cache,
)
from .packing import find_documents

# Keywords without effect on FoX: the longest packed document, and the positions of new tokens in a cache.
_IGNORED_KEYWORDS = {"max_length_q", "max_length_k", "cache_position"}
# The styles of tensor parallelism other than "colwise"; gate_proj stacks the rows of two matrices.
_LINEAR_STYLES = {"attn.o_proj": "rowwise", "mlp.gate_proj": "packed_colwise", "mlp.down_proj": "rowwise"}


class FoXBackbone(FoXModel):
    """``FoXModel`` with the arguments and the output of a decoder of transformers."""

    def __init__(self, config: ForgettingTransformerConfig):
        super().__init__(config.to_fox())
        self.settings = config

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ForgettingTransformerCache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """The last hidden states (B, T, hidden), after the final norm.

        Arguments and errors are those of :meth:`ForgettingTransformerForCausalLM.forward`.
        """
        if self.settings.output_attentions if output_attentions is None else output_attentions:
            raise ValueError(
                "output_attentions is not supported, because no kernel stores attention weights; remove it"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        if past_key_values is not None:
            check_cache(past_key_values, self.settings)
        documents = find_documents(tokens, attention_mask, past_key_values, position_ids, kwargs)
        given = {name for name, value in kwargs.items() if value is not None}
        if unknown := sorted(given - _IGNORED_KEYWORDS):
            raise TypeError(f"forward does not accept {', '.join(unknown)}; remove the argument")
        if use_cache is None:
            use_cache = self.settings.use_cache and not torch.is_grad_enabled() and documents is None
        if past_key_values is None and use_cache:
            past_key_values = ForgettingTransformerCache(self.settings)
        seq_start = self._padding(attention_mask, tokens, past_key_values)
        states: list[Tensor] = []
        if output_hidden_states is None:
            output_hidden_states = self.settings.output_hidden_states
        with _watch_inputs(self.layers if output_hidden_states else (), states):
            cache = None if past_key_values is None else past_key_values.fox
            hidden = super().forward(tokens, cache, seq_start, documents)
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=(*states, hidden) if output_hidden_states else None,
        )
        return_dict = self.settings.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _padding(self, mask: Tensor | None, tokens: Tensor, cache) -> Tensor | None:
        """(B,) the first real token of left-padded rows, or None."""
        held = 0 if cache is None else cache.get_seq_length()
        if mask is not None and held and not bool(mask[:, held:].all()):
            raise ValueError(
                "attention_mask has zeros after the cached tokens, where no row may have padding; pass ones"
            )
        if mask is None or held:  # the cache stores the padding
            return None
        if mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {tuple(tokens.shape[:2])}, got "
                f"{tuple(mask.shape)}; FoX supports padding masks only"
            )
        real = mask.bool()
        start = real.int().argmax(-1)
        changes = real[:, 1:] != real[:, :-1]
        # Padding before and after the text is allowed. More changes mean padding inside the text.
        allowed = (start > 0).int() + (~real[:, -1]).int()
        if bool((changes.sum(-1) > allowed).any()):
            raise ValueError("attention_mask has zeros between ones; only the ends of a row may be padding")
        if cache is not None:
            cache.right_padded = bool((~real[:, -1]).any())
        return start if bool((start > 0).any()) else None


class ForgettingTransformerModel(PreTrainedModel):
    """FoX without its head, for ``AutoModel``."""

    config: ForgettingTransformerConfig
    config_class = ForgettingTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FoXBlock"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = ["lm_head.weight"]  # noqa: RUF012

    def __init__(self, config: ForgettingTransformerConfig):
        super().__init__(config)
        self.model = FoXBackbone(config)
        self.post_init()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> Self:
        """Loads a model as in transformers, from safetensors only; tensors that do not match are an error.

        Raises:
            OSError: the folder has no safetensors.
            ValueError: tensors are missing, unexpected, of another shape or not finite (the message lists
                them), or their digest differs from that in ``done.json``.
        """
        with_info = kwargs.pop("output_loading_info", False)
        check_sum(Path(str(pretrained_model_name_or_path), kwargs.get("subfolder", "")))
        forced = dict.fromkeys(("output_loading_info", "ignore_mismatched_sizes", "use_safetensors"), True)
        options = {**kwargs, **forced}
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *model_args, **options)
        model, info = loaded
        check_loaded(str(pretrained_model_name_or_path), model, info)
        generation = getattr(model, "generation_config", None)  # none without a head
        if generation and (generation.bos_token_id, generation.eos_token_id) == MEANINGLESS_IDS:
            # transformers copies the ids of config.json, which the config itself reads differently.
            generation.bos_token_id = model.config.bos_token_id
            generation.eos_token_id = model.config.eos_token_id
        return (model, info) if with_info else model  # pyright: ignore[reportReturnType]

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False, allow_all_kernels: bool = False
    ) -> str:
        if attn_implementation not in (None, "eager"):  # transformers passes one of these if users pass none
            raise ValueError(
                f"attn_implementation={attn_implementation!r} is not an implementation of FoX: its attention "
                "runs on the kernels of acp_repro.attention (Triton on a GPU, blockwise on a CPU); remove "
                "the argument"
            )
        return "eager"

    def init_parallel_plans(self) -> None:
        """Sets the plan of ``tp_plan="auto"``: each rank computes some heads and some columns of the MLP."""
        super().init_parallel_plans()
        self._tp_plan = {}
        for name, module in self.model.layers[0].named_modules():
            generic = f"model.layers.*.{name}"
            if isinstance(module, HeadRMSNorm) and module.weight.numel() == module.head_dim:
                # All heads share this weight, so each rank computes a part of its gradient.
                self._tp_plan[generic] = "replicated_with_grad_allreduce"
            elif isinstance(module, HeadRMSNorm):
                self._tp_plan |= {f"{generic}.weight": "colwise", generic: "local_params"}
            elif isinstance(module, nn.Linear):
                self._tp_plan[generic] = _LINEAR_STYLES.get(name, "colwise")

    def _resolve_parallel_plans(self, distributed_config: Any) -> Any:
        heads, size = self.config.num_heads, distributed_config.tp_size
        if heads % size:
            raise ValueError(f"tp_size={size} does not divide the {heads} heads; choose a divisor of {heads}")
        return super()._resolve_parallel_plans(distributed_config)

    def _init_weights(self, module: Any) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding, as transformers names it."""
        return self.model.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the embedding."""
        self.model.embeddings = value

    def get_decoder(self) -> FoXBackbone:
        """The model without its head."""
        return self.model

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast | tuple:
        """The last hidden states (B, T, hidden), after the final norm.

        Arguments and errors are those of :meth:`ForgettingTransformerForCausalLM.forward`, without labels.
        """
        return self.model(*args, **kwargs)


class ForgettingTransformerForCausalLM(ForgettingTransformerModel, GenerationMixin):
    """FoX with its language-model head, for ``AutoModelForCausalLM``, ``Trainer`` and ``generate``."""

    def __init__(self, config: ForgettingTransformerConfig):
        super().__init__(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config.initializer_range)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The language-model head, as transformers names it."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the language-model head."""
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ForgettingTransformerCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits, and the mean loss if there are labels.

        Args:
            input_ids: (B, T) integer; with a cache, the tokens after the cached ones.
            attention_mask: (B, cached + T) of 0 and 1. Zeros are padding: on the left, or on the right of
                rows that are not continued.
            position_ids: FoX has no positions. In a batch of one, each 0 marks the start of a packed
                document; ``cu_seq_lens_q``, ``cu_seq_lens_k`` and ``seq_idx`` are alternatives. Packed
                documents do not affect each other and have no cache.
            past_key_values: the cache to continue from; it is extended in place.
            labels: (B, T) integer, the ids of input_ids. The model shifts them and ignores -100, as in
                transformers.
            use_cache: return a cache; by default ``config.use_cache`` if no gradients are recorded.
            logits_to_keep: return only this many last logits, or those at these indices; 0 returns all.
            inputs_embeds: (B, T, hidden), instead of input_ids.
            num_items_in_batch: the divisor of the sum of losses; by default the number of labels.
            **kwargs: keywords for packed documents.

        Returns:
            logits (B, T, vocab) in the dtype of the head's output; loss, a scalar in nats.

        Raises:
            TypeError: an unknown keyword is passed.
            ValueError: the cache belongs to another class or model, a row has padding inside or after cached
                tokens, ``position_ids`` do not count, or attention weights are requested, which no kernel
                stores.
        """
        output: Any = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache,
            output_attentions,
            output_hidden_states,
            True,
            inputs_embeds,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """Creates the FoX cache, because the default cache of transformers stores no forget gates."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported, because "
                "FoX has a cache of its own (ForgettingTransformerCache); remove the setting"
            )
        if (mask := model_kwargs.get("attention_mask")) is not None and not bool(mask[:, -1].all()):
            raise ValueError(RIGHT_PADDING_ERROR)
        if (given := model_kwargs.get("past_key_values")) is not None:
            check_cache(given, self.config)
        elif generation_config.use_cache is not False:
            # Unlimited: another turn, drafts and PEFT's virtual tokens exceed max_cache_length.
            cache = ForgettingTransformerCache(self.config)
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs["past_key_values"] = cache


@contextlib.contextmanager
def _watch_inputs(layers, states: list[Tensor]) -> Iterator[None]:
    """A context in which the input of each of ``layers`` is appended to ``states``."""
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])) for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
