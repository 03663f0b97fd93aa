"""The keys of a suite file of ACP: each block is a validated dataclass. The defaults are the paper's."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from acp_repro.common.bounds import Axis, Count, CountFrom0, Must, Positive, Seed, Share, whole
from acp_repro.model.config import LogEpsilon
from acp_repro.pipeline.data.config import SMALLEST_BPE, DataConfig
from acp_repro.pipeline.evaluation.catalogue import PAPER_TASKS, TASKS
from acp_repro.pipeline.run import Strict, TrainerConfig, check_divides
from acp_repro.pipeline.suite_file import SuiteFile

SWEPT_LOG_PRUNING_TOLERANCES = [-1.0, -5.0, -10.0, -20.0, -40.0]  # of Figure 7
# Keys of TrainingConfig that a size may set for itself.
SIZE_OVERRIDES = ("micro_batch_tokens", "gradient_checkpointing")


@dataclass(frozen=True)
class SizeConfig(Strict):
    """One row of Table 2: a model size with its token budget.

    Attributes:
        num_hidden_layers: number of transformer blocks.
        hidden_size: width of the model.
        tokens: number of training tokens.
        learning_rate: peak learning rate.
        head_dim: width of an attention head.
        micro_batch_tokens: overrides ``training.micro_batch_tokens`` for this size, by the GPU's memory.
        gradient_checkpointing: overrides ``training.gradient_checkpointing`` for this size.
        qk_norm_share_param_across_head: whether all heads of a layer share the QK-norm weights.
        vocab_size: trains a byte-pair encoding of this many ids instead of ``data.tokenizer``.
    """

    num_hidden_layers: Count
    hidden_size: Count
    tokens: Count
    learning_rate: Positive
    head_dim: Count = 64
    micro_batch_tokens: Count | None = None
    gradient_checkpointing: bool | None = None
    qk_norm_share_param_across_head: bool = False
    vocab_size: Annotated[int, whole(SMALLEST_BPE)] | None = None

    def __post_init__(self):
        check_divides(self, "head_dim", "hidden_size")

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def training_overrides(self) -> dict[str, Any]:
        """The keys of ``training`` that this size sets for itself."""
        values = {name: getattr(self, name) for name in SIZE_OVERRIDES}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def non_embedding(self) -> int:
        """The approximate number of parameters of the blocks, which orders sizes."""
        return 12 * self.num_hidden_layers * self.hidden_size**2


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainerConfig):
    """Appendix B; the defaults are the paper's.

    Attributes:
        batch_tokens: tokens of one optimiser step.
        micro_batch_tokens: tokens of one forward pass on one GPU.
        warmup_tokens: tokens of the linear warm-up of the learning rate.
        context_parallel: number of ranks that share each sequence. DDP or FSDP2 spans all ranks.
        implementation: attention kernels of the training run: this project's, or the authors'.
    """

    HOW: ClassVar = (*TrainerConfig.HOW, "context_parallel")

    batch_tokens: Count = 2**19
    micro_batch_tokens: Count = 2**15
    warmup_tokens: CountFrom0 = 256 * 2**20
    context_parallel: Count = 1
    implementation: Literal["auto", "official"] = "auto"

    def __post_init__(self):
        check_divides(self, "micro_batch_tokens", "batch_tokens")


@dataclass(frozen=True)
class MeasureConfig(Strict):
    """How much text each metric is measured on; the defaults are the paper's (Appendix B).

    Attributes:
        pruned_ratio_tokens: held-out tokens for the pruned ratio.
        timing_tokens: held-out tokens for the timings.
        timing_repeats: repeats of each timing, of which the median is reported.
        loss_tokens: held-out tokens for the loss.
        sweep_tokens: held-out tokens for each epsilon of Figure 7.
        needle_lengths: context lengths of the needle test, or the number of lengths up to the training
            length.
        needle_depths: depths of the needle, from 0 (beginning) to 1 (end).
        needle_samples: number of haystacks for each length and depth.
        run_for_heads: the run of Figures 1, 4, 5 and 6 (null: the largest run with ACP, at its shortest
            context).
        run_for_sweep: the run of Figure 7 (null: ``run_for_heads``).
        lm_eval_tasks: downstream tasks of Tables 1 and 3.
        lm_eval_items: number of first items of each task (null: all).
        lm_eval_data: a folder of the tasks' files (null: the Hub).
        gate_distribution: the synthetic gates of the benchmarks of kernels and training steps.
    """

    pruned_ratio_tokens: Count = 128 * 2**20
    timing_tokens: Count = 32 * 2**20
    timing_repeats: Count = 1
    loss_tokens: Count = 2 * 10**9
    sweep_tokens: Count = 32 * 2**20
    needle_lengths: Count | Axis[Count] = 11
    needle_depths: Axis[Share] = field(default_factory=lambda: [i / 10 for i in range(11)])
    needle_samples: Count = 5
    # `compare=False`: these keys select a run and invalidate no record.
    run_for_heads: str | None = field(default=None, compare=False)
    run_for_sweep: str | None = field(default=None, compare=False)
    lm_eval_tasks: Annotated[list[Literal[TASKS]], Must("a non-empty list of tasks", len)] = field(
        default_factory=lambda: list(PAPER_TASKS)
    )
    lm_eval_items: Count | None = None
    lm_eval_data: str | None = None
    gate_distribution: Literal["mixed", "paper_ratio"] = "mixed"


@dataclass(frozen=True, kw_only=True)
class GridConfig(Strict):
    """Lists whose product makes the runs, in this order.

    Attributes:
        architecture: FoX (Pro), FoX (LLaMA), or the RoPE baseline.
        size: names under ``sizes``.
        context_length: training sequence length in tokens.
        log_pruning_tolerance: log epsilon (null: exact attention).
        seed: seed of the initial weights and the order of the data.
        needle_fraction: fraction of training sequences that contain needles. See needle/documents.py.
        perturb_init: k changes the k-th initial weight by one unit of bfloat16, to show the effect of chance
            (true: 1).
    """

    architecture: Axis[Literal["pro", "llama", "rope"]] = field(default_factory=lambda: ["pro"])
    size: Axis[str]
    context_length: Axis[Count]
    log_pruning_tolerance: Axis[LogEpsilon | None] = field(default_factory=lambda: [-10.0, None])
    seed: Axis[Seed] = field(default_factory=lambda: [0])
    needle_fraction: Axis[Share] = field(default_factory=lambda: [0.0])
    perturb_init: Axis[bool | CountFrom0] = field(default_factory=lambda: [False])


@dataclass(frozen=True, kw_only=True)
class File(SuiteFile):
    """The keys at the top of a suite file of ACP."""

    data: DataConfig
    sizes: dict[str, SizeConfig]
    grid: list[GridConfig]
    training: TrainingConfig = field(default_factory=TrainingConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
