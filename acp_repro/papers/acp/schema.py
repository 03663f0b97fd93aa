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
    """One row of Table 2: a model size with its token budget."""

    num_hidden_layers: Count
    hidden_size: Count
    tokens: Count
    learning_rate: Positive
    head_dim: Count = 64
    # The memory of a GPU limits these by size; null uses the value under training.
    micro_batch_tokens: Count | None = None
    gradient_checkpointing: bool | None = None
    # Two choices of the paper that suites on less text change. The first shares the QK-norm weights among all
    # heads of a layer. The second sets the vocabulary, a byte-pair encoding of this many ids (null uses
    # data.tokenizer).
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
    """Appendix B; the defaults are the paper's."""

    HOW: ClassVar = (*TrainerConfig.HOW, "context_parallel")

    batch_tokens: Count = 2**19
    micro_batch_tokens: Count = 2**15
    warmup_tokens: CountFrom0 = 256 * 2**20
    context_parallel: Count = 1  # ranks that share each sequence; DDP or FSDP2 spans all ranks
    implementation: Literal["auto", "official"] = "auto"  # official: the authors' attention kernels

    def __post_init__(self):
        check_divides(self, "micro_batch_tokens", "batch_tokens")


@dataclass(frozen=True)
class MeasureConfig(Strict):
    """How much text each metric is measured on; the defaults are the paper's (Appendix B)."""

    pruned_ratio_tokens: Count = 128 * 2**20
    timing_tokens: Count = 32 * 2**20
    timing_repeats: Count = 1
    loss_tokens: Count = 2 * 10**9
    sweep_tokens: Count = 32 * 2**20
    # The needle test: the context lengths, or the number of lengths up to the training length; the depths of
    # the needle, from 0 (beginning) to 1; and the number of haystacks for each.
    needle_lengths: Count | Axis[Count] = 11
    needle_depths: Axis[Share] = field(default_factory=lambda: [i / 10 for i in range(11)])
    needle_samples: Count = 5
    # `compare=False`: these keys select a run and invalidate no record. run_for_heads (Figures 1, 4, 5, 6)
    # defaults to the largest run with ACP at its shortest context, and run_for_sweep (Figure 7) to
    # run_for_heads.
    run_for_heads: str | None = field(default=None, compare=False)
    run_for_sweep: str | None = field(default=None, compare=False)
    lm_eval_tasks: Annotated[list[Literal[TASKS]], Must("a list of tasks, at least one", len)] = field(
        default_factory=lambda: list(PAPER_TASKS)  # Tables 1 and 3
    )
    lm_eval_items: Count | None = None  # only the first items of each task; null: all
    lm_eval_data: str | None = None  # a folder of the tasks' files; default: from the Hub
    # The synthetic gates of the benchmarks of kernels and training steps.
    gate_distribution: Literal["mixed", "paper_ratio"] = "mixed"


@dataclass(frozen=True, kw_only=True)
class GridConfig(Strict):
    """Lists whose product makes the runs, in this order."""

    architecture: Axis[Literal["pro", "llama", "rope"]] = field(default_factory=lambda: ["pro"])
    size: Axis[str]
    context_length: Axis[Count]
    log_pruning_tolerance: Axis[LogEpsilon | None] = field(default_factory=lambda: [-10.0, None])
    seed: Axis[Seed] = field(default_factory=lambda: [0])
    # The fraction of training sequences that contain needles; see needle/documents.py.
    needle_fraction: Axis[Share] = field(default_factory=lambda: [0.0])
    # k initially changes the k-th weight by one unit of bfloat16, to show the effect of chance (true: 1).
    perturb_init: Axis[bool | CountFrom0] = field(default_factory=lambda: [False])


@dataclass(frozen=True, kw_only=True)
class File(SuiteFile):
    """The keys at the top of a suite file of ACP."""

    data: DataConfig
    sizes: dict[str, SizeConfig]
    grid: list[GridConfig]
    training: TrainingConfig = field(default_factory=TrainingConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
