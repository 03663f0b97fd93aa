"""The FoX language model: pre-norm blocks, a final RMSNorm, an untied head; positions with RoPE alone."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from acp_repro.attention.exchange import find_group, shard_positions

from .cache import FoXCache
from .config import FoXConfig
from .generation import generate
from .layer_cache import LayerCache
from .layers import ForgettingAttentionLayer, Linear, make_rotation
from .loss import head_cross_entropy
from .modules import is_plain, runs_kernels
from .norms import RMSNorm, add_and_norm
from .pretrained import read_checkpoint, save_pretrained
from .swiglu import SwiGLU


class FoXBlock(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: FoXConfig):
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = ForgettingAttentionLayer(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(
            config.hidden_size, config.mlp_width, config.initializer_range, config.fuse_training
        )

    def forward(
        self,
        x: Tensor,
        cache: LayerCache | None = None,
        seq_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden), both in the dtype of the residual stream."""
        x, change = self.advance(x, None, cache, seq_start, cu_seqlens, rotation)
        return x + change

    def advance(self, x: Tensor, change: Tensor | None, *context: Any) -> tuple[Tensor, Tensor]:
        """The residual stream after the attention, and what the MLP adds to it, which is not added yet.

        Args:
            change: what the block before this one adds to x, or None.
            context: the arguments of ``forward`` after x.
        """
        x, normed = add_and_norm(x, change, self.attn_norm)
        x, normed = add_and_norm(x, self.attn(normed, *context), self.mlp_norm)
        return x, self.mlp(normed)


class Embedding(nn.Embedding):
    """nn.Embedding that is initialised as N(0, std^2) (Appendix B)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, std: float):
        self.std = std  # before nn.Embedding.__init__, which calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # see Linear
            nn.init.normal_(self.weight, std=self.std)


class FoXModel(nn.Module):
    """Embedding, blocks and the final norm.

    Attributes:
        gradient_checkpointing: keep only each block's input for the backward pass and compute the block again
            there. The gradients are the same, for less memory and about a third more work.
    """

    context_parallel: ProcessGroup | None = None  # see FoXForCausalLM.set_context_parallel
    embeddings: nn.Embedding
    layers: Sequence[FoXBlock]  # an nn.ModuleList

    def __init__(self, config: FoXConfig):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.embeddings = Embedding(config.vocab_size, config.hidden_size, config.initializer_range)
        self.layers = cast(Any, nn.ModuleList(FoXBlock(config) for _ in range(config.num_hidden_layers)))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        cache: FoXCache | None = None,
        seq_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """(B, T) integer -> (B, T, hidden), after the final norm.

        Args:
            input_ids: or embeddings (B, T, hidden) of any floating dtype in their place.
            cache: continue after what it holds, and extend it in place.
            seq_start: (B,) int64, the first real token of left-padded rows. A cache stores this argument, so
                pass it only with the first tokens of a cache.
            cu_seqlens: (documents + 1,) int32 or int64, the starts of documents packed into a batch of one,
                and their end; see ``forgetting_attention``. Each gives what it gives alone.

        Raises:
            ValueError: the cache cannot store these tokens (see ``FoXCache.begin``), or the model has a
                ``context_parallel`` group and would decode.
        """
        if cache is not None and self.context_parallel is not None:
            raise ValueError("a cache cannot hold a shard: call set_context_parallel(None) before decoding")
        if cache is not None and cu_seqlens is not None:
            raise ValueError("a cache cannot hold packed documents: call without one (use_cache=False)")
        if cache is not None and len(cache.layers) != len(self.layers):
            raise ValueError(
                f"cache has {len(cache.layers)} layers, the model has {len(self.layers)}:"
                " make it with FoXCache(config.num_hidden_layers)"
            )
        try:
            # The embedding precedes the cache's bookkeeping, because an id out of range is an error here.
            x = input_ids if input_ids.is_floating_point() else self.embeddings(input_ids)
        except IndexError as error:  # raised on a CPU; a GPU does not report the id
            size, low, high = self.embeddings.num_embeddings, int(input_ids.min()), int(input_ids.max())
            raise ValueError(
                f"input_ids must be 0 or more and below vocab_size {size}, got {low if low < 0 else high}"
            ) from error
        if cache is not None:
            seq_start = cache.begin(input_ids, seq_start, self)
        rotation = None
        if self.config.use_rope:
            # Scores depend on distances only, so positions may count padding and earlier documents. With a
            # cache, positions are read on the device, as a CUDA graph requires. The rotation is computed once
            # for all blocks: in a compiled block, each head would compute its own sines.
            position = shard_positions(x.shape[1], self.context_parallel, x.device)
            if cache is not None and cache.seqlens is not None:
                position = position + (cache.seqlens[:1] - x.shape[1])
            rotation = make_rotation(position, self.config.head_dim)
        recompute = self.gradient_checkpointing and cache is None and torch.is_grad_enabled()
        # The addition at the end of a block shares a kernel with the norm after it, if nobody watches blocks.
        joint = (cache is not None or runs_kernels(x)) and is_plain(*cast(Any, self.layers))
        change = None
        if joint and cache is not None and cache.fuses and not cache.length:
            ForgettingAttentionLayer.join_narrow([block.attn for block in self.layers], cache.layers)
        for index, block in enumerate(self.layers):
            held = None if cache is None else cache.layers[index]
            if joint:
                x, change = block.advance(x, change, held, seq_start, cu_seqlens, rotation)
            elif recompute:
                # The model has no dropout, so no random state needs to be saved.
                x = checkpoint(
                    block,
                    *(x, None, seq_start, cu_seqlens, rotation),
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                x = block(x, held, seq_start, cu_seqlens, rotation)
        if cache is not None:
            cache.count(input_ids.shape[1])
        return add_and_norm(x, change, self.norm)[1]


class FoXForCausalLM(nn.Module):
    """FoX with its language-model head; ``from_pretrained`` and ``save_pretrained`` read and write folders.

    Weights are float32, initialised as in Appendix B, and the same for the same ``torch.manual_seed``. Run it
    under ``torch.autocast(device_type, torch.bfloat16)`` for the paper's mixed precision.

    Args:
        config: the model's shape.
        gradient_checkpointing: see ``FoXModel``; can be set later.
    """

    def __init__(self, config: FoXConfig, gradient_checkpointing: bool = False):
        super().__init__()
        self.config = config
        self.model = FoXModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config.initializer_range)
        self.gradient_checkpointing = gradient_checkpointing

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in the backward pass instead of kept."""
        return self.model.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.model.gradient_checkpointing = value

    def set_log_pruning_tolerance(self, value: float | None) -> None:
        """Changes log epsilon of every layer (None: exact), as if the config had it.

        Raises:
            ValueError: ``FoXConfig`` does not allow the value.
        """
        self.config = dataclasses.replace(self.config, log_pruning_tolerance=value)
        self.model.config = self.config
        for block in self.model.layers:
            block.attn.log_pruning_tolerance = value

    def set_context_parallel(self, context_parallel: Any) -> None:
        """Lets the model read shards of sequences (``shard_sequence``), each rank of the group its own.

        ``seq_start`` and ``cu_seqlens`` count the tokens of whole sequences. The gradients of the weights are
        those of this rank's tokens, so they must be summed over the ranks.

        Args:
            context_parallel: a process group or a one-dimensional device mesh; None reads whole sequences.

        Raises:
            TypeError: ``context_parallel`` is no group.
        """
        group = None if context_parallel is None else find_group(context_parallel)
        for module in self.modules():
            if hasattr(module, "context_parallel"):
                cast(Any, module).context_parallel = group

    def forward(
        self,
        input_ids: Tensor,
        cache: FoXCache | None = None,
        return_hidden: bool = False,
        labels: Tensor | None = None,
        seq_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Logits, or the tensor that ``return_hidden`` or ``labels`` selects.

        Args:
            input_ids: (B, T) integer.
            cache: continue after what it holds, and extend it in place; needs torch.no_grad().
            return_hidden: return (B, T, hidden), the input of the head.
            labels: (B, T) integer; return the loss of each token, see ``loss_per_token``. Wrappers that hook
                ``forward`` (FSDP, DDP) see it.
            seq_start: (B,) int64, the first real token of left-padded rows; see ``FoXModel``.
            cu_seqlens: the starts of packed documents; see ``FoXModel``. Labels at the last token of each are
                -100.

        Returns:
            (B, T, vocab) logits in the dtype of the head's product (bfloat16 under autocast).

        Raises:
            ValueError: input_ids or labels have another shape or dtype, or the cache has another number of
                layers.
        """
        self.check_input_ids(input_ids)
        if labels is not None and (labels.shape != input_ids.shape or labels.is_floating_point()):
            raise ValueError(
                f"labels must be integers of the shape of input_ids {tuple(input_ids.shape)},"
                f" got {labels.dtype} {tuple(labels.shape)}"
            )
        hidden = self.model(input_ids, cache, seq_start, cu_seqlens)
        if labels is not None:
            return head_cross_entropy(hidden, self.lm_head, labels)
        return hidden if return_hidden else self.lm_head(hidden)

    def loss_per_token(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of every token, in nats.

        Args:
            input_ids: (B, T) integer.
            labels: (B, T) integer, the token that should follow each; -100 has loss 0.

        Returns:
            (B, T) float32. The logits are stored once, in the dtype of the head's product. Float32 copies
            exist for one chunk of tokens at a time, in both passes.
        """
        return self(input_ids, labels=labels)

    generate = generate
    save_pretrained = save_pretrained

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        **overrides: Any,
    ) -> Self:
        """Loads a model from a folder in the authors' format.

        Args:
            folder: with ``config.json`` and ``model.safetensors`` or its shards; or a run folder of this
                project, ``runs/SUITE/RUN``, whose weights are in ``model/``.
            device: device of the weights.
            dtype: dtype of the weights, independent of the file's.
            **overrides: fields of ``FoXConfig`` that replace the file's, such as
                ``log_pruning_tolerance=None`` for exact attention.

        Raises:
            FileNotFoundError: the folder or one of its files is missing, or the run is not finished; the
                message names it.
            ValueError: a damaged file, weights that are not finite or not those that ``done.json`` names, an
                unsupported feature, a config field that is missing or wrong, or tensors that do not fit the
                config; the message names the file, and what is right.
            ImportError: safetensors is not installed.
        """
        config, tensors = read_checkpoint(cls, folder, device, dtype, **overrides)
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(tensors, assign=True)
        return model

    @staticmethod
    def check_input_ids(input_ids: Tensor) -> None:
        """Raises ValueError unless ``input_ids`` (B, T) are integers, at least one a row."""
        integer = not (input_ids.is_floating_point() or input_ids.dtype == torch.bool)
        if input_ids.dim() != 2 or input_ids.numel() == 0 or not integer:
            raise ValueError(
                "input_ids must be integers of shape (batch, time), at least one token each,"
                f" got {input_ids.dtype} {tuple(input_ids.shape)}"
            )


def load_pretrained(folder: str | os.PathLike[str], **options: Any) -> FoXForCausalLM:
    """:meth:`FoXForCausalLM.from_pretrained` as a function, with the same options and errors."""
    return FoXForCausalLM.from_pretrained(folder, **options)
