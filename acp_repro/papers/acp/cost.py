"""The cost of a training run by formula: FLOPs, memory per GPU, and GPU-hours. Needs no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from acp_repro.model.config import FoXConfig, peak_flops

from .runs import FoXRun
from .schema import SizeConfig

FLOAT32 = 4
PRUNED_RATIO = 0.7  # "around 70 %" (abstract), at all lengths and sizes
MFU = 0.3  # an assumption about executed FLOPs: small models reach less, large models more


def attention_share_of_flops(size: SizeConfig, context_length: int) -> float:
    """Fraction (0 to 1) of the FLOPs per token that attention uses in FoX (Pro) without pruning, with the
    authors' vocabulary (Section 4.2)."""
    config = FoXConfig.pro(
        hidden_size=size.hidden_size, num_hidden_layers=size.num_hidden_layers, num_heads=size.num_heads
    )
    without = config.flops_per_token(context_length, keep_ratio=0.0)
    return 1.0 - without / config.flops_per_token(context_length)


@dataclass(frozen=True)
class Cost:
    """The cost of one run. ``parameters`` exclude the input embedding; ``memory`` is the peak of one GPU in
    bytes; ``exchanged`` is the number of bytes that all GPUs send per step for context parallelism."""

    parameters: int
    steps: int
    tokens: int
    flops: float
    executed_flops: float
    memory: float
    exchanged: float
    gpu_hours: float


def run_cost(run: FoXRun, gpu: str, ranks: int) -> Cost:
    """The cost of ``run`` on ``ranks`` GPUs, assuming perfect scaling."""
    config = run.model_config(run.data.vocab_size or _count_words(Path(run.data.tokenizer_file)))
    tokens = run.steps * run.training.batch_tokens
    executed = tokens * config.flops_per_token(run.context_length, _kept(run))
    return Cost(
        parameters=config.num_parameters(),
        steps=run.steps,
        tokens=tokens,
        flops=tokens * config.flops_per_token(run.context_length),
        executed_flops=executed,
        memory=states_bytes(run, config, ranks) + _activation_bytes(run, config),
        exchanged=_exchanged_bytes(run, config),
        gpu_hours=executed / (MFU * peak_flops(gpu)) / 3600,
    )


def _count_words(tokenizer: Path) -> int:
    return len(json.loads(tokenizer.read_text())["model"]["vocab"]) + 1  # BOS


def states_bytes(run: FoXRun, config: FoXConfig, ranks: int) -> float:
    """Weights, gradients and AdamW's moments of one GPU, and Autocast's copies of the matrices."""
    states = 4 * FLOAT32 * config.num_parameters(non_embedding=False)
    if run.parallel_mode(ranks) == "fsdp":
        # Weights and moments are sharded; weights and gradients remain unsharded between micro-batches.
        states = states * (3 / 4 / ranks + 2 / 4)
    return states + (2 * config.num_parameters() if run.training.dtype == "bfloat16" else 0)


def _kept(run: FoXRun) -> float:
    """Fraction of the attention that is computed; ranks are assumed to send the same fraction of keys."""
    return 1.0 if run.log_pruning_tolerance is None else 1.0 - PRUNED_RATIO


def _exchanged_bytes(run: FoXRun, config: FoXConfig) -> float:
    """Bytes sent per step in context parallelism: gates, and causal keys and values in both passes."""
    training = run.training
    tokens = training.batch_tokens * (training.context_parallel - 1)
    half = 2 if training.dtype == "bfloat16" else FLOAT32
    # Chunks in zig-zag order need 3 / 4 of the keys of an all-gather. Gradients are float32.
    keys = 0.75 * _kept(run) * 2 * config.hidden_size * (half + FLOAT32)
    gates = config.num_heads * FLOAT32 * (1 + 0.75 * _kept(run))
    return config.num_hidden_layers * tokens * (keys + gates)


def _activation_bytes(run: FoXRun, config: FoXConfig) -> float:
    """Activation memory of a micro-batch at the start of the backward pass, with compiled blocks, including
    logits. Results that are cheap to recompute (norms, sigmoids of gates) are not stored."""
    sharing, layers = run.training.context_parallel, config.num_hidden_layers
    tokens, width = run.training.micro_batch_tokens // sharing, config.hidden_size
    half = 2 if run.training.dtype == "bfloat16" else FLOAT32
    shifts = config.use_k_shift + config.use_v_shift
    # The output of the norm; projected q, k and v; the output of the attention; the input of o_proj. Then
    # normalised q and k, shifted k and v, the output gate and norm, and the input of the MLP.
    wide = 6 + 2 * config.qk_norm + shifts + config.use_output_gate + config.use_output_norm + 1
    swiglu = 3 * config.mlp_width  # gate, up, and their product
    # log_fgate, the running sum in float64, the row sums, and the logits of the gates.
    per_head = FLOAT32 + 8 + FLOAT32 + half * (1 + shifts)
    residual = 2 * FLOAT32 * width  # before the attention, and before the MLP
    block = tokens * (residual + half * (wide * width + swiglu) + per_head * config.num_heads)
    if sharing > 1:
        # Keys and values of this rank and received ones; gates and their running sums of all tokens.
        keys = tokens + _kept(run) * (sharing - 1) * tokens
        block += 2 * keys * width * half + sharing * tokens * config.num_heads * (FLOAT32 + 8)
    kept = layers * block
    if run.training.gradient_checkpointing:
        kept = layers * tokens * FLOAT32 * width + block
    return kept + config.vocab_size * (tokens * half + FLOAT32 * width)  # logits, the head's gradient
