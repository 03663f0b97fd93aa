"""The keys of a suite file of ACP, each block one validated dataclass. The defaults are the paper's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from acp_repro.chain.errors import UnknownName
from acp_repro.chain.run import Strict, TrainerConfig, positive
from acp_repro.chain.suite import SuiteFile
from acp_repro.data.config import DataConfig

from .evaluation.catalogue import PAPER_TASKS, check_names

# Keys of TrainingConfig that a size may set for itself.
SIZE_OVERRIDES = ("micro_batch_tokens", "gradient_checkpointing")
# Keys that came after the first records, whose settings do not name them: left out where they are not set.
LATER_KEYS = ("qk_norm_share_param_across_head", "vocab_size")


@dataclass(frozen=True)
class SizeConfig(Strict):
    """One row of Table 2: a model size with its token budget."""

    num_hidden_layers: int
    hidden_size: int
    tokens: int
    learning_rate: float
    head_dim: int = 64
    # What fits a GPU depends on the size; null takes what stands under training.
    micro_batch_tokens: int | None = None
    gradient_checkpointing: bool | None = None
    # Two of the paper's choices that suites on less text make otherwise: QK-norm weights that all heads of a
    # layer share, and the number of words (a byte-pair encoding of so many ids; null takes data.tokenizer).
    qk_norm_share_param_across_head: bool = False
    vocab_size: int | None = None

    def __post_init__(self):
        positive(self, "num_hidden_layers", "hidden_size", "tokens", "learning_rate", "head_dim")
        if self.vocab_size is not None:
            positive(self, "vocab_size")
        if self.hidden_size % self.head_dim:
            raise ValueError(
                f"hidden_size: {self.hidden_size} must be a multiple of head_dim {self.head_dim}"
            )

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
        """About the number of weights of the blocks, to order sizes by."""
        return 12 * self.num_hidden_layers * self.hidden_size**2


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainerConfig):
    """Appendix B; the defaults are the paper's."""

    batch_tokens: int = 2**19
    micro_batch_tokens: int = 2**15
    warmup_tokens: int = 256 * 2**20
    initializer_range: float = 0.02

    def __post_init__(self):
        super().__post_init__()
        positive(self, "batch_tokens", "micro_batch_tokens", "initializer_range")
        if self.batch_tokens % self.micro_batch_tokens:
            raise ValueError(
                f"micro_batch_tokens: {self.micro_batch_tokens} must divide batch_tokens {self.batch_tokens}"
            )
        if self.warmup_tokens < 0:
            raise ValueError(f"warmup_tokens: must not be negative, got {self.warmup_tokens}")


@dataclass(frozen=True)
class MeasureConfig(Strict):
    """How much text each quantity is measured on; the defaults are the paper's (Appendix B)."""

    pruned_ratio_tokens: int = 128 * 2**20
    timing_tokens: int = 32 * 2**20
    timing_repeats: int = 1
    loss_tokens: int = 2 * 10**9
    sweep_tokens: int = 32 * 2**20
    sweep_log_pruning_tolerances: list[float] = field(
        default_factory=lambda: [-1.0, -5.0, -10.0, -20.0, -40.0]
    )
    long_context_lengths: list[int] = field(default_factory=list)  # past the training length
    # The needle test: the contexts, or how many of them from short to the training length; places of the
    # needle from 0, the beginning, to 1; and how many haystacks each is tried in.
    needle_lengths: int | list[int] = 11
    needle_depths: list[float] = field(default_factory=lambda: [i / 10 for i in range(11)])
    needle_samples: int = 5
    needle_haystack: str | None = None  # a file or folder of text; default: the held-out text
    heads_run: str | None = None  # Figures 1, 4, 5, 6; default: the largest ACP run, shortest context
    sweep_run: str | None = None  # Figure 7 and what else looks at one model; default: heads_run
    lm_eval_tasks: list[str] = field(default_factory=lambda: list(PAPER_TASKS))  # Tables 1 and 3
    lm_eval_items: int | None = None  # only the first so many items of each task
    lm_eval_data: str | None = None  # a folder of the tasks' files; default: from the Hub

    def __post_init__(self):
        positive(
            self,
            "pruned_ratio_tokens",
            "timing_tokens",
            "timing_repeats",
            "loss_tokens",
            "sweep_tokens",
            "needle_samples",
        )
        if not self.needle_depths or not all(0 <= depth <= 1 for depth in self.needle_depths):
            raise ValueError(f"needle_depths: each is between 0 and 1; got {self.needle_depths}")
        lengths = self.needle_lengths if isinstance(self.needle_lengths, list) else [self.needle_lengths]
        if not lengths or not all(length > 0 for length in lengths):
            raise ValueError(f"needle_lengths: how many, or a list of them, each positive; got {lengths}")
        if not all(length > 0 for length in self.long_context_lengths):
            raise ValueError(f"long_context_lengths: each is positive; got {self.long_context_lengths}")
        for name in ("needle_depths", "needle_lengths", "long_context_lengths"):
            values = getattr(self, name)
            if isinstance(values, list) and len(set(values)) != len(values):
                raise ValueError(f"{name}: must be different values; got {values}")
        if not all(value < 0 for value in self.sweep_log_pruning_tolerances):
            raise ValueError(
                "sweep_log_pruning_tolerances: each is log(epsilon), negative; got "
                f"{self.sweep_log_pruning_tolerances}"
            )
        if self.lm_eval_items is not None:
            positive(self, "lm_eval_items")
        if not self.lm_eval_tasks:
            raise ValueError("lm_eval_tasks: name a task")
        try:
            check_names(self.lm_eval_tasks)
        except UnknownName as error:
            raise ValueError(f"lm_eval_tasks: {error}") from None


@dataclass(frozen=True)
class GridConfig(Strict):
    """Lists whose product makes the runs."""

    size: list[str]
    context_length: list[int]
    architecture: list[str] = field(default_factory=lambda: ["pro"])
    log_pruning_tolerance: list[float | None] = field(default_factory=lambda: [-10.0, None])
    seed: list[int] = field(default_factory=lambda: [0])
    # Of the training sequences, how many hold needles of their own; see needle/documents.py.
    needle_share: list[float] = field(default_factory=lambda: [0.0])
    # True begins with one weight moved by one unit of bfloat16: what chance does to a training of this seed.
    nudged: list[bool] = field(default_factory=lambda: [False])

    def __post_init__(self):
        for name in (f.name for f in dataclasses.fields(self)):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name}: must be a list of different values, got {values}")
        for value in self.architecture:
            if value not in ("pro", "llama"):
                raise ValueError(f"architecture: must be pro or llama, got {value!r}")
        for value in self.context_length:
            if value < 1:
                raise ValueError(f"context_length: must be positive, got {value}")
        for value in self.needle_share:
            if not 0 <= value <= 1:
                raise ValueError(f"needle_share: is a share of the sequences, 0 to 1; got {value}")
        for value in self.log_pruning_tolerance:
            if value is not None and not value < 0:
                raise ValueError(
                    "log_pruning_tolerance: is log(epsilon), negative, or null for exact "
                    f"attention; got {value}"
                )


@dataclass(frozen=True, kw_only=True)
class File(SuiteFile):
    """The keys at the top of a suite file of ACP."""

    data: DataConfig
    sizes: dict[str, SizeConfig]
    grid: list[GridConfig]
    training: TrainingConfig = field(default_factory=TrainingConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
