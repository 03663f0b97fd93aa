"""The keys of a suite file of LAP: each block is a validated dataclass. The defaults are those of the
published code."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from acp_repro.common.bounds import (
    Axis,
    Count,
    CountFrom0,
    NotNegative,
    Positive,
    PositiveOrInf,
    Seed,
    Share,
    ShareBelow1,
    whole,
    within,
)
from acp_repro.lap.config import GATES, TRAINING_MASKS, PruningConfig
from acp_repro.pipeline.data.config import CorpusConfig
from acp_repro.pipeline.run import Strict, TrainerConfig
from acp_repro.pipeline.suite_file import SuiteFile

SHORTEST_CUT = 16
HARD_CONCRETE_TAU = 2 / 3
SHOWN_TEXTS = 5  # short texts of the metric `attribution`, which are drawn word by word


@dataclass(frozen=True)
class TextsConfig(CorpusConfig):
    """The texts, and the held-out fraction.

    Attributes:
        extra_path: a ``file`` of more training texts, without held-out texts and labels.
        text_field: the field that contains the text, for ``file`` and ``hf``.
        label_field: the field that contains the label (null: no probing).
        positive_from: smallest positive label. Probing excludes labels below it and above ``negative_to``.
        negative_to: largest negative label.
        min_chars: minimum number of characters of a text, for ``stdlib_sentences``.
        max_chars: maximum number of characters of a text, for ``stdlib_sentences``.
        vocabulary: vocabulary size of a trained BPE (null: the tokeniser of ``model.weights``).
        heldout: held-out fraction of the texts, chosen by the hash of the text.
        options: other options of the corpus's function.
    """

    NAMED = ("text_field", "label_field", "min_chars", "max_chars")

    corpus: str = "stdlib_sentences"
    extra_path: str | None = None
    text_field: str = "text"
    label_field: str | None = None
    positive_from: float = 1.0
    negative_to: float = 0.0
    min_chars: Count = 20
    max_chars: Count = 160
    vocabulary: Annotated[int, whole(300)] | None = None
    heldout: Annotated[float, within("(0, 1)")] = 0.05
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        super().__post_init__()
        if self.min_chars > self.max_chars:
            raise ValueError(f"max_chars: must be at least min_chars, {self.min_chars}, got {self.max_chars}")
        if not self.negative_to < self.positive_from:
            raise ValueError(f"positive_from: must be above negative_to, {self.negative_to}")

    @property
    def sides(self) -> str:
        """The question that the labels answer, "whether ..."; empty without labels."""
        return "whether a review is positive or negative" if self.label_field else self.function.sides


@dataclass(frozen=True)
class ModelConfig(Strict):
    """The T5 model: its shape, or its initial weights. The default shape is that of Flan-T5-small.

    Attributes:
        weights: initial weights: a name on the Hub, such as ``google/flan-t5-small``, or a folder.
        d_model: width of the model.
        d_kv: width of an attention head.
        d_ff: width of the feed-forward layers.
        num_layers: number of encoder blocks.
        num_decoder_layers: number of decoder blocks.
        num_heads: number of attention heads.
    """

    weights: str | None = None
    d_model: Count = 512
    d_kv: Count = 64
    d_ff: Count = 1024
    num_layers: Count = 8
    num_decoder_layers: Count = 8
    num_heads: Count = 6

    @property
    def shape(self) -> dict[str, float]:
        """The arguments of ``PruningAutoencoder.from_scratch``."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "weights"}


@dataclass(frozen=True)
class PruningSettings(Strict):
    """The settings of ``lap.PruningConfig`` that are not in the grid.

    Hard concrete gates have their own bias and temperature, and logistic noise.

    Attributes:
        beta: bias of the gates.
        tau: temperature of the gates.
        hard_concrete_beta: bias of hard concrete gates.
        hard_concrete_signal_limit: bound on the signal of hard concrete gates (null: none).
        max_length: maximum number of tokens of a text.
    """

    beta: float = 5.0
    tau: float = 0.1
    hard_concrete_beta: float = 2.0
    hard_concrete_signal_limit: PositiveOrInf | None = None
    max_length: int = 512

    def __post_init__(self):
        self.config("published", "soft")
        self.config("published", "hard_concrete")

    def config(self, gate: str, training_mask: str) -> PruningConfig:
        """The model's settings at a point of the grid."""
        settings = dataclasses.asdict(self)
        own = {n: settings.pop(f"hard_concrete_{n}") for n in ("beta", "signal_limit")}
        if training_mask == "hard_concrete":
            settings |= {**own, "tau": HARD_CONCRETE_TAU, "noise": "logistic"}
        if gate == "article":
            settings["noise"] = "none"
        return PruningConfig(gate=gate, training_mask=training_mask, **settings)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainerConfig):
    """A single phase with Adam, as in the published code; lambda is raised once the model copies its text.

    Attributes:
        steps: number of optimiser steps.
        batch_texts: texts of one step.
        learning_rate: peak learning rate.
        warmup_steps: steps of the linear warm-up of the learning rate.
        decay_share: last fraction of the steps, over which the learning rate decays to a tenth.
        lambda_from_step: first step with lambda above 0.
        lambda_below_nats: keeps lambda at 0 and gates inactive until the running mean cross-entropy is below
            this value. Replaces ``lambda_from_step``.
        token_dropout_steps: first steps with active gates, in which gates drop tokens at random. The rate
            is the one that beta implies, and tokens have no cost. The decoder learns to reconstruct without
            any single token. Otherwise each token seems indispensable, and all gates open wide.
        lambda_ramp_steps: steps of the linear rise of lambda.
        lambda_off_loss: running mean cross-entropy in nats from which lambda is 0. Lambda decreases linearly
            towards this value. A large lambda then closes as many gates as this quality permits; a constant
            lambda closes none or all.
        length_warmup_steps: steps in which texts are truncated to a growing length.
        scale_parameter: whether each weight's rate is a multiple of its root mean square, as in Adafactor.
    """

    steps: Count
    batch_texts: Count = 20
    learning_rate: Positive = 1e-4
    warmup_steps: CountFrom0 = 0
    decay_share: Share = 0.0
    lambda_from_step: CountFrom0 = 500
    lambda_below_nats: float | None = None
    token_dropout_steps: CountFrom0 = 0
    lambda_ramp_steps: CountFrom0 = 0
    lambda_off_loss: Positive | None = None
    weight_decay: NotNegative = 0.0
    beta2: ShareBelow1 = 0.999
    length_warmup_steps: CountFrom0 = 0
    scale_parameter: bool = False
    compile: ClassVar[bool] = False  # texts differ in length

    def __post_init__(self):
        for name in ("warmup_steps", "length_warmup_steps"):
            if (warmup := getattr(self, name)) > self.steps:
                raise ValueError(f"{name}: {warmup} are more than the {self.steps} steps; give fewer")


@dataclass(frozen=True)
class StartConfig(Strict):
    """Training of the run without gates, which initialises the others; unset keys are as in ``training``.

    Attributes:
        steps: optimiser steps of the run without gates, which initialises the other runs.
        learning_rate: peak learning rate of this run (null: as in ``training``).
        warmup_steps: warm-up steps of this run (null: as in ``training``).
        length_warmup_steps: steps of this run with truncated texts (null: as in ``training``).
    """

    steps: Count
    learning_rate: Positive | None = None
    warmup_steps: CountFrom0 | None = None
    length_warmup_steps: CountFrom0 | None = None

    def training(self, other: TrainingConfig) -> TrainingConfig:
        """``other``, overridden by the keys that are set here."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(other, **given)


@dataclass(frozen=True)
class MeasureConfig(Strict):
    """The amount of held-out text for each metric.

    Attributes:
        scored_texts: held-out texts that are scored.
        batch_texts: texts of one forward pass.
        probe_texts: training texts of the probes. The probes are tested on held-out texts.
        shap_texts: long texts that are reconstructed for SHAP. Five short texts, which are drawn, come on
            top.
        shap_min_tokens: minimum length of these long texts in tokens.
        timed_lengths: text lengths in tokens for the timings.
        timed_texts: texts of a timed batch.
        main_run: the run for metrics of a single model (null: the first run with hard concrete gates).
    """

    scored_texts: Count = 2000
    batch_texts: Count = 50
    probe_texts: Count = 2000
    shap_texts: Count = 50
    shap_min_tokens: Count = 60
    timed_lengths: Axis[Annotated[int, whole(4)]] = field(default_factory=lambda: [128, 512])
    timed_texts: Count = 16
    # `compare=False`: this key selects a run and invalidates no record.
    main_run: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class GridConfig(Strict):
    """Lists whose product makes the runs.

    Attributes:
        compression: lambda, the weight of the compression loss (null: a run without gates).
        gate: the gates of the published code or of the article.
        training_mask: how gates mask tokens in training.
        seed: seed of the run.
    """

    compression: Axis[NotNegative | None]
    gate: Axis[Literal[GATES]] = field(default_factory=lambda: ["published"])
    training_mask: Axis[Literal[TRAINING_MASKS]] = field(default_factory=lambda: ["soft"])
    seed: Axis[Seed] = field(default_factory=lambda: [42])


@dataclass(frozen=True, kw_only=True)
class File(SuiteFile):
    """The keys at the top of a suite file of LAP."""

    training: TrainingConfig
    grid: list[GridConfig]
    data: TextsConfig = field(default_factory=TextsConfig)
    start: StartConfig | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    pruning: PruningSettings = field(default_factory=PruningSettings)
    measure: MeasureConfig = field(default_factory=MeasureConfig)

    def __post_init__(self):
        if (self.data.vocabulary is None) == (self.model.weights is None):
            raise ValueError(
                "data.vocabulary: set it for a model from scratch, and omit it with model.weights, which "
                "have a tokenizer"
            )
        if self.start is not None:
            if self.model.weights is not None:
                raise ValueError(
                    "start: model.weights already initialises the runs; remove one of the two keys"
                )
            try:
                self.start.training(self.training)
            except ValueError as error:
                raise ValueError(f"start.{error}") from None
