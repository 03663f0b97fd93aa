"""The keys of a suite file of Adaptive Retention. The defaults are the paper's (Section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from acp_repro.common.bounds import (
    Axis,
    Count,
    NotNegative,
    Positive,
    Seed,
    Share,
    ShareBelow1,
    whole,
    within,
)
from acp_repro.pipeline.data.config import BYTES_VOCAB_SIZE, CorpusConfig, DataConfig
from acp_repro.pipeline.run import Strict, TrainerConfig
from acp_repro.pipeline.suite import SuiteFile
from acp_repro.retention.settings import MODEL_TYPES, Budget

# The names under `method` as settings of `acp_repro.retention`: the paper's method, its baselines and the
# ablations of Table 3.
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
MLM = "mlm"  # a run of masked language modelling, which others start from
ABLATIONS = ("ar_no_relaxation", "ar_joint", "ar_fixed", "ar_threshold")
GATES = ("input", "after_blocks", "output")
SPECIAL = PAD, CLS, SEP, UNK, MASK = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
SMALLEST_VOCABULARY = BYTES_VOCAB_SIZE - 1 + len(SPECIAL)  # every byte, BERT's special tokens; no BOS
Scores = Axis[Literal["accuracy", "micro_f1", "macro_f1", "exact_match", "f1"]]


@dataclass(frozen=True)
class DatasetConfig(CorpusConfig):
    """A labelled set, and how long the training on it is.

    Attributes:
        corpus, path, options: of ``acp_repro.pipeline.data.labelled.read_labelled``.
        max_tokens: longer examples are cut; [CLS] and [SEP] are two of them.
        epochs: over the training split.
        batch_examples: of an optimiser step.
        micro_batch_examples: of one pass, or None for the whole batch.
        max_examples: of each split, the first by a hash; None: all.
        scores: those of its table; the first one is compared. ``exact_match`` and ``f1`` are for questions.
    """

    options: dict[str, Any] = field(default_factory=dict, hash=False)
    max_tokens: Annotated[int, whole(3)] = 512
    epochs: Count = 3
    batch_examples: Count = 32
    micro_batch_examples: Count | None = None
    max_examples: Count | None = None
    scores: Scores = field(default_factory=lambda: ["accuracy"], hash=False)

    def __post_init__(self):
        super().__post_init__()
        micro = self.micro_batch_examples
        if micro is not None and self.batch_examples % micro:
            raise ValueError(
                f"micro_batch_examples: {micro} must divide batch_examples {self.batch_examples}"
            )

    @property
    def is_extractive(self) -> bool:
        """Whether its scores are of answers that stand in the text, and not of classes."""
        return bool({"exact_match", "f1"} & set(self.scores))


@dataclass(frozen=True)
class BackboneConfig(Strict):
    """An encoder: weights of transformers by name or folder, or fresh ones of a shape.

    Attributes:
        pretrained: name or folder for ``from_pretrained``; its tokeniser is used too.
        pretrained_on: a name under ``pretraining``. Weights and tokeniser come from the suite's own run of
            that masked language modelling.
        model_type: for fresh weights, one that ``acp_repro.retention`` knows.
        vocab_size: of the byte-pair tokeniser that is then trained on the training split, with special
            tokens.
    """

    pretrained: str | None = None
    pretrained_on: str | None = None
    model_type: Literal[MODEL_TYPES] = "distilbert"
    num_hidden_layers: Count = 6
    hidden_size: Count = 768
    num_attention_heads: Count = 12
    intermediate_size: Count = 3072
    dropout: ShareBelow1 = 0.1
    vocab_size: Annotated[int, whole(SMALLEST_VOCABULARY)] = 2048

    def __post_init__(self):
        if self.pretrained and self.pretrained_on:
            raise ValueError("pretrained_on: weights come from there or from `pretrained`, not from both")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: {self.hidden_size} must be a multiple of num_attention_heads "
                f"{self.num_attention_heads}"
            )


@dataclass(frozen=True)
class PretrainingConfig(Strict):
    """Masked language modelling (Devlin et al. 2019) with new masks each time (Liu et al. 2019).

    Attributes:
        data: of ``pipeline.data``. Its ``tokenizer: {bpe: SIZE}`` becomes the encoder's, with BERT's special
            tokens after its own ids.
        max_tokens: of a sequence, [CLS] and [SEP] included. Texts follow each other without padding.
        batch_sequences: of an optimiser step; micro_batch_sequences: of one pass, None for all of them.
        steps: optimiser steps.
        learning_rate, warmup_share: as under ``training``.
        masked_share: the share of tokens to predict; 80 % of them become [MASK], 10 % another token.
        neighbour_heads: whether the heads of the first block start with attention to neighbouring tokens.
            This saves the thousands of steps that it takes to find them; see ``look_at_neighbours``.
    """

    data: DataConfig
    max_tokens: Annotated[int, whole(4)] = 512
    batch_sequences: Count = 256
    micro_batch_sequences: Count | None = None
    steps: Count = 10_000
    learning_rate: Positive = 5e-4
    warmup_share: ShareBelow1 = 0.06
    masked_share: ShareBelow1 = 0.15
    neighbour_heads: bool = False

    def __post_init__(self):
        if not self.masked_tokens:
            raise ValueError(f"masked_share: {self.masked_share} of {self.max_tokens} tokens is none")
        micro = self.micro_batch_sequences
        if micro is not None and self.batch_sequences % micro:
            raise ValueError(
                f"micro_batch_sequences: {micro} must divide batch_sequences {self.batch_sequences}"
            )
        if self.data.bpe_size is None:
            raise ValueError("data.tokenizer: an encoder's is {bpe: SIZE}, trained on this text")

    @property
    def masked_tokens(self) -> int:
        """Masked tokens of each sequence."""
        return round(self.masked_share * (self.max_tokens - 2))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainerConfig):
    """Section 4.2: AdamW, 3e-5, weight decay 0.01; betas as AdamW has them.

    Attributes:
        warmup_share: share of the steps with a rising learning rate; then it falls linearly to 0. Not
            printed.
        open_share: first share of the steps in which gates are open, so that the model is trained densely. It
            replaces the paper's published weights if an encoder starts from scratch.
        hard_share: last share of the steps, in which gates choose as at inference.
        group_by_length: examples of similar length share a batch, so that less of it is padding.
    """

    learning_rate: Positive = 3e-5
    weight_decay: NotNegative = 0.01
    beta2: ShareBelow1 = 0.999
    warmup_share: Share = 0.0
    open_share: Share = 0.0
    hard_share: Share = 0.0
    group_by_length: bool = False

    def __post_init__(self):
        if self.open_share + self.hard_share > 1:
            raise ValueError("hard_share: with open_share it must not exceed 1")


@dataclass(frozen=True)
class MeasureConfig(Strict):
    """How much is measured.

    Attributes:
        examples: of the test split, for times and for the state of the budget; scores use all of it.
        budgets: at which dense models are pruned at inference only.
        speed_lengths_tokens: lengths of full batches for the times.
        speed_batch_examples: their examples; Table 4 has 32.
        speed_batch_tokens: instead, as many examples as hold this many tokens. A GPU that is not full would
            measure its host.
        timing_repeats: of each time; the median counts.
    """

    examples: Count = 512
    budgets: list[Annotated[float, within("(0, 1)")]] = field(default_factory=lambda: [0.5, 0.3])
    speed_lengths_tokens: list[Count] = field(default_factory=lambda: [512])
    speed_batch_examples: Count = 32
    speed_batch_tokens: Count | None = None
    timing_repeats: Count = 5


@dataclass(frozen=True)
class GridConfig(Strict):
    """Lists whose product makes the runs.

    ``dense`` has budget 1 and no gates, whatever the lists say. The same holds for ``mlm``. Its
    ``dataset`` is a name under ``pretraining``.
    """

    dataset: Axis[str]
    backbone: Axis[str]
    method: Axis[Literal[(*METHODS, MLM)]]
    budget: Axis[Budget] = field(default_factory=lambda: [0.5, 0.3])
    gates: Axis[Literal[(*GATES, "none")]] = field(default_factory=lambda: ["after_blocks"])
    temperature: Axis[Positive] = field(default_factory=lambda: [0.66])
    stretch_low: Axis[float] = field(default_factory=lambda: [-0.1])
    stretch_high: Axis[float] = field(default_factory=lambda: [1.1])
    seed: Axis[Seed] = field(default_factory=lambda: [0])

    def __post_init__(self):
        if self.method in (["dense"], [MLM]):
            for name, only in (("budget", [1.0]), ("gates", ["none"])):
                object.__setattr__(self, name, only)
        for value in {"dense", MLM} & set(self.method):
            if len(self.method) > 1:
                raise ValueError(f"method: {value} has no budget, so give it its own entry of the grid")


@dataclass(frozen=True, kw_only=True)
class File(SuiteFile):
    """The keys at the top of a suite file of Adaptive Retention.

    Attributes:
        retention: settings of ``RetentionConfig`` for all runs, except those in the grid.
        timed: tasks whose models are timed, or runs by name; None: all. The speed of a model depends little
            on its task.
    """

    datasets: dict[str, DatasetConfig]
    backbones: dict[str, BackboneConfig]
    grid: list[GridConfig]
    pretraining: dict[str, PretrainingConfig] = field(default_factory=dict)
    retention: dict[str, Any] = field(default_factory=dict)
    timed: list[str] | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
