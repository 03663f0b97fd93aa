"""The shape of a FoX model, validated once, with the numbers that follow from it; and the speed of GPUs.

Argument names are the official ones, so that a published ``config.json`` and our YAML use the same words.
The module does not import torch, so that planning a suite starts fast.
"""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Self

from acp_repro.common.bounds import Count, Must, Positive, check, number, whole, within

# SwiGLU widths are rounded up to a multiple of this.
MLP_WIDTH_MULTIPLE = 256
# The head dimensions of ``forgetting_attention``, checked here so that an invalid suite fails early.
HEAD_DIM_RANGE = (16, 256)
ROPE_BASE = 500_000.0  # as in all configs of the authors

_PRO = {
    "hidden_ratio": 3.5,
    "qk_norm": True,
    "use_k_shift": True,
    "use_v_shift": True,
    "use_output_gate": True,
    "use_output_norm": True,
}
_LLAMA = {
    "hidden_ratio": 4.0,
    "qk_norm": False,
    "use_k_shift": False,
    "use_v_shift": False,
    "use_output_gate": False,
    "use_output_norm": False,
}
_LOG_EPSILON = (
    "a finite number below 0, the logarithm of an epsilon (-10 in the paper; without one, attention is exact)"
)
LogEpsilon = Annotated[float, number(_LOG_EPSILON, lambda x: -math.inf < x < 0)]


@dataclass(frozen=True, kw_only=True)
class FoXConfig:
    """A Forgetting Transformer, or its RoPE baseline. The defaults are FoX (Pro), 125M.

    Args:
        vocab_size: tokens in the vocabulary (50257: the GPT-2 ids of LongCrawl64).
        hidden_size: width of the residual stream; a multiple of ``num_heads``, 16 to 256 times it.
        num_hidden_layers: blocks; each is one attention layer and one SwiGLU layer (Table 2).
        num_heads: attention heads, all with their own keys and values.
        hidden_ratio: SwiGLU width over ``hidden_size``, before the factor 2/3 and rounding up.
        intermediate_size: the SwiGLU width itself; None computes it from ``hidden_ratio``.
        norm_eps: epsilon of every RMSNorm except the QK-norm (whose epsilon is fixed at 1e-5).
        initializer_range: standard deviation of all weight matrices at the start (Appendix B).
        qk_norm: RMSNorm per head on queries and keys; provides the pruning bound of Appendix E.
        qk_norm_share_param_across_head: one head_dim weight for all heads, as in the public
            checkpoints; False: one weight per head.
        use_k_shift, use_v_shift: data-dependent token shift on keys, on values.
        use_output_gate: multiply the heads' outputs by sigmoid(W_g x).
        use_output_norm: RMSNorm per head on the heads' outputs.
        use_rope: rotate queries and keys by their positions (RoPE), and have no forget gate: the paper's
            Transformer. It is exact.
        log_pruning_tolerance: log epsilon of Section 3, the logarithm of the largest total attention weight
            that may be pruned. None: exact attention, without pruning.
        max_position_embeddings: the context of training, in tokens. The model accepts any length, but
            transformers and lm-eval truncate texts at this length.
        fuse_training: compute the projections of one input in one product, and do not keep SwiGLU's product
            for the backward pass. A module that is wrapped, hooked or adapted is called nevertheless.

    Raises:
        ValueError: a value is out of range or of the wrong type; the message names the argument.
    """

    vocab_size: Count = 50257
    hidden_size: Count = 768
    num_hidden_layers: Count = 12
    num_heads: Count = 12
    hidden_ratio: Positive = 3.5
    intermediate_size: Count | None = None
    norm_eps: Positive = 1e-6
    initializer_range: Positive = 0.02
    qk_norm: bool = True
    qk_norm_share_param_across_head: bool = False
    use_k_shift: bool = True
    use_v_shift: bool = True
    use_output_gate: bool = True
    use_output_norm: bool = True
    use_rope: bool = False
    log_pruning_tolerance: LogEpsilon | None = -10.0
    max_position_embeddings: Count = 2048
    fuse_training: bool = True

    @classmethod
    def pro(cls, **arguments: Any) -> Self:
        """FoX (Pro), Section 4.1: token shift, QK-norm, output gate and norm; ``arguments`` override it."""
        return cls(**{**_PRO, **arguments})

    @classmethod
    def llama(cls, **arguments: Any) -> Self:
        """FoX (LLaMA), Appendix C.2: none of the Pro components; ``arguments`` override it."""
        return cls(**{**_LLAMA, **arguments})

    @classmethod
    def rope(cls, **arguments: Any) -> Self:
        """Transformer (Pro), Section 4.1: FoX (Pro) with RoPE in place of the gate; as above."""
        return cls(**{**_PRO, "use_rope": True, "log_pruning_tolerance": None, **arguments})

    def __post_init__(self) -> None:
        check(self)
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size: must be divisible by num_heads, got hidden_size={self.hidden_size}"
                f" and num_heads={self.num_heads}"
            )
        low, high = HEAD_DIM_RANGE
        if not low <= self.head_dim <= high:
            raise ValueError(
                f"hidden_size / num_heads, the head dimension, must be from {low} to {high},"
                f" got {self.hidden_size} / {self.num_heads} = {self.head_dim}"
            )
        if self.use_rope:
            exact = Must("None with use_rope, which has no gates to prune by", lambda x: x is None)
            exact.ask("log_pruning_tolerance", self.log_pruning_tolerance)
            even = Must("even with use_rope", lambda x: x % 2 == 0)
            even.ask("hidden_size / num_heads", self.head_dim)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_width(self) -> int:
        """``intermediate_size``, or the computed width if that is None."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        width = int(self.hidden_size * self.hidden_ratio * 2 / 3)
        return MLP_WIDTH_MULTIPLE * math.ceil(width / MLP_WIDTH_MULTIPLE)

    def num_parameters(self, non_embedding: bool = True) -> int:
        """Number of trainable parameters in the model.

        Args:
            non_embedding: leave out the input embedding, which is looked up and never multiplied. The head is
                untied and multiplied, so it always counts. The paper's names (125M, 360M, 760M) are this
                number.
        """
        hidden, heads = self.hidden_size, self.num_heads
        norm = hidden
        qk_norm = 2 * (self.head_dim if self.qk_norm_share_param_across_head else hidden)
        block = (
            self._matrix_parameters_per_block()
            + heads * (not self.use_rope)  # the bias of the forget gate; no other projection has a bias
            + 2 * norm
            + (qk_norm if self.qk_norm else 0)
            + (norm if self.use_output_norm else 0)
        )
        total = self.num_hidden_layers * block + norm + self.vocab_size * hidden
        return total if non_embedding else total + self.vocab_size * hidden

    def flops_per_token(
        self, context_length: int, keep_ratio: float = 1.0, *, backward: bool = True
    ) -> float:
        """Floating-point operations per token that the algorithm needs (a multiply-add is two).

        Matrix products only. Attention counts the causal half of the scores, (L + 1) / 2 keys a query on
        average, times ``keep_ratio``. The backward pass counts twice the forward one. Recomputation
        (activation checkpointing, FlashAttention's scores) depends on the implementation and is not counted.

        Args:
            context_length: L, the sequence length in tokens.
            keep_ratio: 1 - pruned ratio, the fraction of the causal blocks that are computed.
            backward: count a training step; False counts the forward pass alone.

        Raises:
            ValueError: context_length is below 1 or keep_ratio outside 0 to 1.
        """
        whole(1).ask("context_length", context_length)
        within("[0, 1]").ask("keep_ratio", keep_ratio)
        matrices = (
            self.num_hidden_layers * self._matrix_parameters_per_block() + self.vocab_size * self.hidden_size
        )
        # Scores and weighted sum: two products of hidden_size multiply-adds per (query, key) pair.
        pairs = keep_ratio * (context_length + 1) / 2
        attention = self.num_hidden_layers * 4 * self.hidden_size * pairs
        return (3 if backward else 1) * (2 * matrices + attention)

    def _matrix_parameters_per_block(self) -> int:
        hidden, heads = self.hidden_size, self.num_heads
        square = 4 + self.use_output_gate  # q, k, v, o, and the output gate
        per_head = (not self.use_rope) + self.use_k_shift + self.use_v_shift  # forget gate, token shifts
        return square * hidden**2 + per_head * heads * hidden + 3 * hidden * self.mlp_width


# Dense tensor-core FLOP/s with 16-bit inputs and float32 accumulation, without sparsity. Patterns match the
# result of torch.cuda.get_device_name or a short form of it; the first match applies.
_PEAK_FLOPS_16_BIT: tuple[tuple[str, float], ...] = (
    (r"\bA100\b", 312e12),  # NVIDIA A100 datasheet, PCIe and SXM alike
    (r"\bH100 PCIe\b", 756e12),  # NVIDIA H100 datasheet (2022), 1,513 with sparsity
    (r"\bH100 NVL\b", 835e12),  # NVIDIA H100 datasheet, 1,671 with sparsity
    (r"\bH100\b", 989e12),  # NVIDIA H100 datasheet, SXM, 1,979 with sparsity
    (r"\bH200 NVL\b", 835e12),  # NVIDIA H200 datasheet, 1,671 with sparsity
    (r"\bH200\b", 989e12),  # NVIDIA H200 datasheet, SXM, 1,979 with sparsity
    (r"\bL40S\b", 362e12),  # NVIDIA L40S datasheet, 733 with sparsity
    (r"\bB200\b", 2250e12),  # NVIDIA DGX B200 datasheet: 36 PFLOP/s with sparsity, 8 GPUs
    # NVIDIA Ada GPU architecture whitepaper, Table 2. The laptop and D models use other chips.
    (r"\b(RTX )?4090\b(?! (Laptop|D\b))", 165e12),
)


def peak_flops(device_name: str, dtype: object = "bfloat16") -> float | None:
    """Dense FLOP/s that the maker states for a GPU; None for a GPU or dtype that this table does not have.

    Args:
        device_name: as ``torch.cuda.get_device_name`` returns it, or short: ``h100``, ``a100``.
        dtype: ``bfloat16`` or ``float16``, as text or as torch's.
    """
    if str(dtype).removeprefix("torch.") not in ("bfloat16", "float16"):
        return None
    rows = (flops for name, flops in _PEAK_FLOPS_16_BIT if re.search(name, device_name, re.IGNORECASE))
    return next(rows, None)
