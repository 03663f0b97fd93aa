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
    """The texts, and the held-out fraction."""

    NAMED = ("text_field", "label_field", "min_chars", "max_chars")

    corpus: str = "stdlib_sentences"
    extra_path: str | None = None  # a ``file`` of more training texts, without held-out texts and labels
    text_field: str = "text"  # of ``file`` and ``hf``
    label_field: str | None = None  # null: no probing
    positive_from: float = 1.0  # probing excludes labels between this and ``negative_to``
    negative_to: float = 0.0
    min_chars: Count = 20  # characters of a text, for ``stdlib_sentences``
    max_chars: Count = 160
    vocabulary: Annotated[int, whole(300)] | None = None  # of a BPE; null: the tokeniser of ``model.weights``
    heldout: Annotated[float, within("(0, 1)")] = 0.05  # fraction of texts, chosen by the hash of the text
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # further ones of the corpus's function

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
    """The T5 model: its shape, or its initial weights. The default shape is that of Flan-T5-small."""

    weights: str | None = None  # a name on the Hub or a folder, such as google/flan-t5-small
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
    """A single phase with Adam, as in the published code; lambda is raised once the model copies its text."""

    steps: Count
    batch_texts: Count = 20
    learning_rate: Positive = 1e-4
    warmup_steps: CountFrom0 = 0
    decay_share: Share = 0.0  # over this last fraction of the steps the rate decays to a tenth
    lambda_from_step: CountFrom0 = 500
    # Alternative: lambda is 0 and gates are inactive until the running mean cross-entropy is below this.
    lambda_below_nats: float | None = None
    # For so many steps after that, gates drop tokens at random, at the rate that beta implies, without a
    # cost. The decoder learns to reconstruct without any single token. Otherwise each token seems
    # indispensable, and all gates open wide.
    token_dropout_steps: CountFrom0 = 0
    lambda_ramp_steps: CountFrom0 = 0
    # Lambda decreases linearly with the running mean cross-entropy and is 0 at this value and above (nats). A
    # large lambda then closes as many gates as this quality permits; a constant lambda closes none or all.
    lambda_off_loss: Positive | None = None
    weight_decay: NotNegative = 0.0
    beta2: ShareBelow1 = 0.999
    length_warmup_steps: CountFrom0 = 0  # texts are truncated to a growing length
    scale_parameter: bool = False  # each weight's rate is a multiple of its root mean square
    compile: ClassVar[bool] = False  # texts differ in length

    def __post_init__(self):
        for name in ("warmup_steps", "length_warmup_steps"):
            if (warmup := getattr(self, name)) > self.steps:
                raise ValueError(f"{name}: {warmup} are more than the {self.steps} steps; give fewer")


@dataclass(frozen=True)
class StartConfig(Strict):
    """Training of the run without gates, which initialises the others; unset keys are as in ``training``."""

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
    """The amount of held-out text for each metric."""

    scored_texts: Count = 2000
    batch_texts: Count = 50
    probe_texts: Count = 2000  # training texts of the probes, which are tested on held-out texts
    shap_texts: Count = 50  # reconstructed long texts, in addition to five short texts that are drawn
    shap_min_tokens: Count = 60  # minimum length of the long texts
    timed_lengths: Axis[Annotated[int, whole(4)]] = field(default_factory=lambda: [128, 512])
    timed_texts: Count = 16
    # The run for metrics of a single model (default: the first run with hard concrete gates).
    # `compare=False`: this key selects a run and invalidates no record.
    main_run: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class GridConfig(Strict):
    """Lists whose product makes the runs. ``compression`` is lambda; null is a run without gates."""

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
