"""The keys of a suite file of Adaptive Retention. The defaults are the paper's (Section 4.2)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from acp_repro.chain.run import Strict, TrainerConfig, positive
from acp_repro.chain.suite import SuiteFile

# What a name under `method` means as settings of `acp_repro.retention`: the paper's method, its baselines
# and the ablations of Table 3.
METHODS: dict[str, dict[str, Any]] = {
    "dense": {"method": "dense"},
    "random": {"method": "random"},
    "h2o": {"method": "h2o"},
    "top": {"method": "top"},
    "infor_coef": {"method": "infor_coef"},
    "ar": {"method": "adaptive"},
    "ar_no_relaxation": {"method": "adaptive", "relaxation": "sigmoid"},
    "ar_joint": {"method": "adaptive", "multiplier": "joint"},
    "ar_fixed": {"method": "adaptive", "multiplier": "fixed", "initial_multiplier": 1.0},
    "ar_threshold": {"method": "adaptive", "selection": "threshold"},
}
ABLATIONS = ("ar_no_relaxation", "ar_joint", "ar_fixed", "ar_threshold")
GATES = ("input", "after_blocks", "output")


@dataclass(frozen=True)
class DatasetConfig(Strict):
    """A labelled set, and how long one trains on it.

    Attributes:
        reader, path, options: of ``acp_repro.data.labelled.read_labelled``.
        max_tokens: longer examples are cut.
        epochs: over the training split.
        batch_examples: of an optimiser step.
        max_examples: of each split, the first by a hash; None: all.
        scores: those of its table, the first of which is compared: ``accuracy``, ``micro_f1``,
            ``macro_f1``; ``exact_match`` and ``f1`` of questions.
    """

    reader: str
    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 512
    epochs: int = 3
    batch_examples: int = 32
    max_examples: int | None = None
    scores: list[str] = field(default_factory=lambda: ["accuracy"])

    def __post_init__(self):
        positive(self, "max_tokens", "epochs", "batch_examples")
        if self.max_examples is not None:
            positive(self, "max_examples")
        known = ("accuracy", "micro_f1", "macro_f1", "exact_match", "f1")
        if not self.scores or not set(self.scores) <= set(known):
            raise ValueError(f"scores: must be some of {', '.join(known)}, got {self.scores}")


@dataclass(frozen=True)
class BackboneConfig(Strict):
    """An encoder: weights of transformers by name or folder, or fresh ones of a shape.

    Attributes:
        pretrained: name or folder for ``from_pretrained``; its tokeniser is taken too.
        model_type: of fresh weights, one that ``acp_repro.retention`` knows.
        vocab_size: of the byte-pair tokeniser that is then trained on the training split, specials included.
    """

    pretrained: str | None = None
    model_type: str = "distilbert"
    num_hidden_layers: int = 6
    hidden_size: int = 768
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    dropout: float = 0.1
    vocab_size: int = 2048

    def __post_init__(self):
        positive(
            self, "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"
        )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: {self.hidden_size} must be a multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: must be in [0, 1), got {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainerConfig):
    """Section 4.2: AdamW, 3e-5, weight decay 0.01; betas as AdamW has them.

    Attributes:
        warmup_share: of the steps, with a rising learning rate; then it falls to 0 in a line. Not printed.
        micro_batch_examples: of one pass, or None for the whole batch.
        open_share: first share of the steps in which gates are open, so that the model is trained densely:
            instead of the paper's published weights, where an encoder starts from scratch.
        hard_share: last share of the steps, in which gates choose as at inference.
    """

    learning_rate: float = 3e-5
    weight_decay: float = 0.01
    beta2: float = 0.999
    warmup_share: float = 0.0
    micro_batch_examples: int | None = None
    open_share: float = 0.0
    hard_share: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        positive(self, "learning_rate")
        for name in ("warmup_share", "open_share", "hard_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be in [0, 1], got {getattr(self, name)}")
        if self.open_share + self.hard_share > 1:
            raise ValueError("hard_share: with open_share it must not exceed 1")
        if self.micro_batch_examples is not None:
            positive(self, "micro_batch_examples")


@dataclass(frozen=True)
class MeasureConfig(Strict):
    """How much is measured.

    Attributes:
        examples: of the test split, for times and for the state of the budget; scores take all of it.
        budgets: at which dense models are pruned at inference only.
        speed_lengths_tokens: lengths of full batches for the times.
        speed_batch_examples: their examples; Table 4 has 32.
        timing_repeats: of each time; the median counts.
    """

    examples: int = 512
    budgets: list[float] = field(default_factory=lambda: [0.5, 0.3])
    speed_lengths_tokens: list[int] = field(default_factory=lambda: [512])
    speed_batch_examples: int = 32
    timing_repeats: int = 5

    def __post_init__(self):
        positive(self, "examples", "speed_batch_examples", "timing_repeats")
        if not all(0 < budget < 1 for budget in self.budgets):
            raise ValueError(f"budgets: each must be in (0, 1), got {self.budgets}")


@dataclass(frozen=True)
class GridConfig(Strict):
    """Lists whose product makes the runs. ``dense`` has budget 1 and no gates, whatever stands here."""

    dataset: list[str]
    backbone: list[str]
    method: list[str]
    budget: list[float] = field(default_factory=lambda: [0.5, 0.3])
    gates: list[str] = field(default_factory=lambda: ["after_blocks"])
    temperature: list[float] = field(default_factory=lambda: [0.66])
    stretch_low: list[float] = field(default_factory=lambda: [-0.1])
    stretch_high: list[float] = field(default_factory=lambda: [1.1])
    seed: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self):
        if self.method == ["dense"]:
            for name, only in (("budget", [1.0]), ("gates", ["none"])):
                object.__setattr__(self, name, only)
        for name in (f.name for f in dataclasses.fields(self)):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name}: must be a list of different values, got {values}")
        for value in self.method:
            if value not in METHODS:
                raise ValueError(f"method: must be one of {', '.join(METHODS)}, got {value!r}")
        for value in self.gates:
            if value not in (*GATES, "none"):
                raise ValueError(f"gates: must be one of {', '.join(GATES)}, got {value!r}")
        if "dense" in self.method and len(self.method) > 1:
            raise ValueError("method: dense has no budget, so give it an entry of the grid for itself")


@dataclass(frozen=True, kw_only=True)
class File(SuiteFile):
    """The keys at the top of a suite file of Adaptive Retention.

    ``retention`` holds settings of ``RetentionConfig`` for all runs, but for what the grid says.
    """

    datasets: dict[str, DatasetConfig]
    backbones: dict[str, BackboneConfig]
    grid: list[GridConfig]
    retention: dict[str, Any] = field(default_factory=dict)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
