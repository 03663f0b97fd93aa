"""The keys of a suite file of Adaptive Retention. The defaults are the paper's (Section 4.2)."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from acp_repro.common.bounds import Axis, Count, NotNegative, Positive, Seed, Share, ShareBelow1, whole
from acp_repro.pipeline.data.config import BYTES_VOCAB_SIZE, CorpusConfig, DataConfig
from acp_repro.pipeline.run import Strict, TrainerConfig, check_divides
from acp_repro.pipeline.suite_file import SuiteFile
from acp_repro.retention.config import MODEL_TYPES, Budget

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
MASKED_SHARE = 0.15  # fraction of tokens to predict; 80 % become [MASK], 10 % another token
MLM = "mlm"  # a run of masked language modelling, which initialises other runs
ABLATIONS = ("ar_no_relaxation", "ar_joint", "ar_fixed", "ar_threshold")
RIGHT, WRONG = "+-"  # an example in the column `items_right` of the metric `score`
GATES = ("input", "after_blocks", "output")
SPECIAL = PAD, CLS, SEP, UNK, MASK = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
SMALLEST_VOCABULARY = BYTES_VOCAB_SIZE - 1 + len(SPECIAL)  # every byte, BERT's special tokens; no BOS
Scores = Axis[Literal["accuracy", "micro_f1", "macro_f1", "exact_match", "f1"]]


@dataclass(frozen=True)
class DatasetConfig(CorpusConfig):
    """A labelled set and the length of its training; ``read_labelled`` receives corpus, path and options.

    Attributes:
        options: other options of the corpus's function.
        max_tokens: length at which examples are truncated, including ``[CLS]`` and ``[SEP]``.
        epochs: number of passes over the training split.
        batch_examples: examples of one optimiser step.
        micro_batch_examples: examples of one forward pass (null: the whole batch).
        max_examples: maximum number of examples of each split, the first by hash (null: all).
        scores: scores of the task. Claims compare the first one; ``exact_match`` and ``f1`` are for
            questions.
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
        check_divides(self, "micro_batch_examples", "batch_examples")

    @property
    def is_extractive(self) -> bool:
        """Whether the task is extractive question answering instead of classification."""
        return bool({"exact_match", "f1"} & set(self.scores))


@dataclass(frozen=True)
class BackboneConfig(Strict):
    """An encoder: weights of transformers, by name or folder, or random weights of a shape.

    Attributes:
        pretrained: a name on the Hub or a folder, from which weights and tokenizer are loaded.
        pretrained_on: a name under ``pretraining``, the source of weights and tokenizer.
        model_type: architecture of the encoder.
        num_hidden_layers: number of transformer blocks.
        hidden_size: width of the encoder.
        num_attention_heads: number of attention heads.
        intermediate_size: width of the feed-forward layers.
        dropout: dropout rate.
        vocab_size: vocabulary size of a tokenizer that is trained on the training split.
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
            raise ValueError(
                "pretrained_on: excludes `pretrained`, because both provide the weights; remove one of them"
            )
        check_divides(self, "num_attention_heads", "hidden_size")


@dataclass(frozen=True)
class PretrainingConfig(Strict):
    """Masked language modelling (Devlin et al. 2019) with new masks each time (Liu et al. 2019).

    Attributes:
        max_tokens: tokens of a sequence. Texts are concatenated without padding.
        batch_sequences: sequences of one optimiser step.
        micro_batch_sequences: sequences of one forward pass (null: the whole batch).
        steps: number of optimiser steps.
        learning_rate: peak learning rate.
        neighbour_heads: whether heads initially attend to neighbouring tokens (``look_at_neighbours``).
    """

    data: DataConfig  # its ``tokenizer: {bpe: SIZE}`` becomes the encoder's, with BERT's special tokens
    max_tokens: Annotated[int, whole(6)] = 512
    batch_sequences: Count = 256
    micro_batch_sequences: Count | None = None
    steps: Count = 10_000
    learning_rate: Positive = 5e-4
    neighbour_heads: bool = False

    def __post_init__(self):
        check_divides(self, "micro_batch_sequences", "batch_sequences")
        if self.data.bpe_size is None:
            raise ValueError("data.tokenizer: an encoder's is {bpe: SIZE}, trained on this text")

    @property
    def masked_tokens(self) -> int:
        return round(MASKED_SHARE * (self.max_tokens - 2))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainerConfig):
    """Section 4.2: AdamW with learning rate 3e-5, weight decay 0.01 and the default betas.

    Attributes:
        learning_rate: peak learning rate.
        warmup_share: first fraction of the steps, with linear warm-up. Linear decay to 0 follows; the paper
            does not state it.
        open_share: first fraction of the steps, with open gates. It substitutes for the paper's published
            weights.
        hard_share: last fraction of the steps, with hard gates as at inference.
        group_by_length: whether a batch has examples of similar length, to reduce padding.
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
    """The amount of data for each metric.

    Attributes:
        examples: examples for masked loss and slackness. Scores use the whole split.
        speed_lengths_tokens: text lengths in tokens for the timings.
        speed_batch_tokens: tokens of a timed batch (null: 32 examples, as in Table 4). 32 examples may not
            saturate a GPU.
        timing_repeats: repeats of each timing, of which the median is reported.
    """

    examples: Count = 512
    speed_lengths_tokens: list[Count] = field(default_factory=lambda: [512])
    speed_batch_tokens: Count | None = None
    timing_repeats: Count = 5


@dataclass(frozen=True)
class GridConfig(Strict):
    """Lists whose product is the runs; ``dense`` and ``mlm`` have budget 1 and no gates.

    Attributes:
        dataset: names under ``datasets``, or under ``pretraining`` for ``mlm``.
        backbone: names under ``backbones``.
        method: the paper's method ``ar``, its ablations ``ar_...``, a baseline, or ``mlm`` for pre-training.
        budget: fraction of the tokens that gates keep.
        gates: position of the gates.
        temperature: beta of Equation 6.
        stretch_low: gamma of Equation 6.
        stretch_high: zeta of Equation 6.
        seed: seed of the run.
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
        retention: arguments of ``RetentionConfig`` for all runs.
        benchmarks: tasks or names of runs to benchmark (null: all).
    """

    datasets: dict[str, DatasetConfig]
    backbones: dict[str, BackboneConfig]
    grid: list[GridConfig]
    pretraining: dict[str, PretrainingConfig] = field(default_factory=dict)
    retention: dict[str, Any] = field(default_factory=dict)
    benchmarks: list[str] | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
