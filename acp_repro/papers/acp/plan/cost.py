"""The cost of one training run by formula: FLOPs, memory of a GPU, GPU-hours. Needs no torch.

Memory counts what must be alive at the peak, the start of the backward pass, with compiled blocks. An eager
pass keeps more, and the allocator wastes some.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from acp_repro.chain.errors import SuiteError
from acp_repro.model.config import FoXConfig
from acp_repro.model.flops import peak_flops

from ..settings import SizeConfig
from ..suite import FoXRun

if TYPE_CHECKING:
    from .speed import Speeds

FLOAT32 = 4


@dataclass(frozen=True)
class Assumptions:
    """The assumptions of a plan.

    Attributes:
        gpu: a name in the table of ``model.flops.peak_flops``.
        ranks: GPUs that share a run.
        mfu: the share of the GPU's dense 16-bit FLOP/s that executed FLOPs reach.
        pruned_ratio: the share of the causal attention that runs with ACP leave out.
        vocab_size: for tokenizers whose size the settings do not give; None reads the file.
    """

    gpu: str = "h100"
    ranks: int = 1
    mfu: float = 0.3
    pruned_ratio: float = 0.7
    vocab_size: int | None = None

    def __post_init__(self):
        if self.ranks < 1:
            raise SuiteError(f"--nproc {self.ranks}: must be at least 1")
        if not 0 < self.mfu <= 1:
            raise SuiteError(f"--mfu {self.mfu}: must be above 0 and at most 1")
        if not 0 <= self.pruned_ratio <= 1:
            raise SuiteError(f"--pruned-ratio {self.pruned_ratio}: must be from 0 to 1")

    @property
    def peak_flops(self) -> float:
        """Dense 16-bit FLOP/s of the GPU; NaN if the table does not have it."""
        return peak_flops(self.gpu) or math.nan


def attention_share_of_flops(size: SizeConfig, context_length: int) -> float:
    """Attention's part, 0 to 1, of the FLOPs of a token of FoX (Pro), nothing pruned (Section 4.2).

    The vocabulary is the authors' tokeniser's, the default of ``FoXConfig``.
    """
    config = FoXConfig.pro(
        hidden_size=size.hidden_size, num_hidden_layers=size.num_hidden_layers, num_heads=size.num_heads
    )
    without = config.flops_per_token(context_length, kept_ratio=0.0)
    return 1.0 - without / config.flops_per_token(context_length)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        states: float32 weights, gradients and both moments of AdamW, this rank's share, and what FSDP gathers
            while it computes.
        activations: kept for the backward pass of one micro-batch without gradient checkpointing.
        activations_checkpointed: the same with checkpointing: each block's input, and one block in full.
        logits: of one micro-batch, and the float32 gradient of the head.
        peak: states, logits, and the activations with or without checkpointing, as the settings choose.
    """

    states: float
    activations: float
    activations_checkpointed: float
    logits: float
    peak: float


@dataclass(frozen=True)
class Cost:
    """One run; FLOPs are of the whole run, ``tokens_per_s`` is of one GPU.

    ``parameters`` leave out the input embedding, as the paper's names of sizes do.
    """

    run: FoXRun
    parameters: int
    tokens: int
    steps: int
    nominal_flops: float
    executed_flops: float
    mode: str
    memory: Memory
    tokens_per_s: float
    source: str

    @property
    def gpu_hours(self) -> float:
        return self.tokens / self.tokens_per_s / 3600


def cost_of(run: FoXRun, assumptions: Assumptions, speeds: Speeds) -> Cost:
    """The cost of ``run``.

    Raises:
        SuiteError: the size of the vocabulary is not known, or the ranks cannot share a step.
    """
    training = run.training
    micro_batches = training.batch_tokens // training.micro_batch_tokens
    if micro_batches % assumptions.ranks:
        raise SuiteError(
            f"{run.name}: a step of {micro_batches} micro-batches cannot be shared by "
            f"{assumptions.ranks} ranks; choose --nproc that divides it, or a smaller micro_batch_tokens"
        )
    config = run.model_config(_vocab_size(run, assumptions))
    steps = math.ceil(run.size.tokens / training.batch_tokens)
    tokens = steps * training.batch_tokens
    nominal = config.flops_per_token(run.context_length)
    pruned = assumptions.pruned_ratio if run.log_pruning_tolerance is not None else 0.0
    executed = config.flops_per_token(run.context_length, 1.0 - pruned)
    mode = run.parallel_mode(assumptions.ranks)
    tokens_per_s, source = speeds.of(run, assumptions.gpu) or (
        assumptions.mfu * assumptions.peak_flops / executed,
        f"{assumptions.mfu:.0%} MFU",
    )
    return Cost(
        run,
        config.num_parameters(),
        tokens,
        steps,
        nominal * tokens,
        executed * tokens,
        mode,
        memory_of(run, config, mode, assumptions.ranks),
        tokens_per_s,
        source,
    )


def memory_of(run: FoXRun, config: FoXConfig, mode: str, ranks: int) -> Memory:
    """Bytes on each GPU at the peak of a step."""
    parameters, tokens = config.num_parameters(non_embedding=False), run.training.micro_batch_tokens
    half = 2 if run.training.dtype == "bfloat16" else FLOAT32
    states = 4 * FLOAT32 * parameters  # weights, gradients, two moments
    if mode == "fsdp":
        # Weights and moments are sharded; between micro-batches weights and gradients stay whole.
        states = 3 * states / 4 / ranks + 2 * FLOAT32 * parameters
    # Autocast keeps a copy of each matrix in the lower precision until the backward pass is over.
    copies = 0 if half == FLOAT32 else half * config.num_parameters()
    per_block = tokens * _bytes_per_token_of_a_block(config, half)
    inputs = tokens * config.hidden_size * FLOAT32
    activations = config.num_hidden_layers * per_block
    checkpointed = config.num_hidden_layers * inputs + per_block
    logits = tokens * config.vocab_size * half + FLOAT32 * config.vocab_size * config.hidden_size
    chosen = checkpointed if run.training.gradient_checkpointing else activations
    return Memory(states + copies, activations, checkpointed, logits, states + copies + chosen + logits)


def _bytes_per_token_of_a_block(config: FoXConfig, half: int) -> int:
    """Bytes that a compiled block keeps of each token for its backward pass.

    The residual stream is float32. Inputs and outputs of matrix products are in the lower precision. Results
    that are cheap to compute again (norms, gates' sigmoids) are not kept.
    """
    width, mlp, heads = config.hidden_size, config.mlp_width, config.num_heads
    residual = 2 * FLOAT32 * width  # before the attention, and before the MLP
    # The norm's output; q, k and v as projected; the attention's output; what o_proj reads.
    attention = half * width * (1 + 3 + 1 + 1)
    if config.qk_norm:
        attention += half * width * 2  # q and k as the attention reads them
    if config.use_v_shift:
        attention += half * width  # v likewise
    if config.use_k_shift:
        attention += half * width  # k as mixed, which its norm reads
    if config.use_output_gate:
        attention += half * width
    if config.use_output_norm:
        attention += half * width
    # log_fgate, the running sum in float64, the row sums, and the logits of the gates.
    per_head = FLOAT32 + 8 + FLOAT32 + half * (1 + config.use_k_shift + config.use_v_shift)
    swiglu = half * (width + 3 * mlp)  # the norm's output, gate, up, and their product
    return residual + attention + per_head * heads + swiglu


def _vocab_size(run: FoXRun, assumptions: Assumptions) -> int:
    size = run.data.vocab_size or assumptions.vocab_size
    if size is None:
        path = Path(run.data.tokenizer_file)
        try:
            content = json.loads(path.read_text())
            size = len(content["model"]["vocab"]) + 1  # BOS
        except (OSError, ValueError, KeyError) as error:
            raise SuiteError(f"{path}: holds no vocabulary; give its size with --vocab-size") from error
    return size
