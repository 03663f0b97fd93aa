"""The keys of a suite file of LAP, each block one validated dataclass; defaults as in the published code."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from acp_repro.common.bounds import (
    Axis,
    Count,
    CountFrom0,
    Must,
    NotNegative,
    Positive,
    PositiveOrInf,
    Seed,
    Share,
    ShareBelow1,
    whole,
    within,
)
from acp_repro.lap.settings import GATES, TRAINING_MASKS, PruningConfig, Temperature
from acp_repro.pipeline.data.config import CorpusConfig
from acp_repro.pipeline.run import Strict, TrainerConfig
from acp_repro.pipeline.suite import SuiteFile

SHORTEST_CUT = 16


@dataclass(frozen=True)
class TextsConfig(CorpusConfig):
    """Which texts, and which of them are held out.

    Attributes:
        corpus, path: see ``CorpusConfig``.
        more_path: a ``file`` with more texts, for training only: none of them is held out or has a label.
        text_field, label_field: fields of ``file`` and ``hf``; without labels there is no probing.
        positive_from, negative_to: a label of at least the first is positive, of at most the second negative.
            Texts between them are left out of probing.
        shortest, longest: characters of a text, for ``stdlib_sentences``.
        vocabulary: ids of a byte-pair encoding trained on the training texts; null uses the tokeniser of
            ``model.weights``.
        heldout: the share of texts held out, by the text's own hash.
        options: other options of the corpus's function.
    """

    NAMED = ("text_field", "label_field", "shortest", "longest")

    corpus: str = "stdlib_sentences"
    more_path: str | None = None
    text_field: str = "text"
    label_field: str | None = None
    positive_from: float = 1.0
    negative_to: float = 0.0
    shortest: Count = 20
    longest: Count = 160
    vocabulary: Annotated[int, whole(300)] | None = None
    heldout: Annotated[float, within("(0, 1)")] = 0.05
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        super().__post_init__()
        if self.shortest > self.longest:
            raise ValueError(f"longest: must be at least shortest, {self.shortest}, got {self.longest}")
        if not self.negative_to < self.positive_from:
            raise ValueError(f"positive_from: must be above negative_to, {self.negative_to}")

    @property
    def sides(self) -> str:
        """The question that the two sides of labels answer, "whether ..."; empty if there is nothing to
        probe."""
        return "whether a review is positive or negative" if self.label_field else self.function.sides


@dataclass(frozen=True)
class ModelConfig(Strict):
    """The T5: its shape, or the weights that it starts from. The default shape is Flan-T5-small's."""

    weights: str | None = None  # a name on the Hub or a folder, such as google/flan-t5-small
    d_model: Count = 512
    d_kv: Count = 64
    d_ff: Count = 1024
    num_layers: Count = 8
    num_decoder_layers: Count = 8
    num_heads: Count = 6
    dropout_rate: Annotated[
        float, Must("0, because a resumed run would draw other noise", lambda x: not x)
    ] = 0.0

    @property
    def shape(self) -> dict[str, float]:
        """For ``PruningAutoencoder.from_scratch``."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "weights"}


@dataclass(frozen=True)
class PruningSettings(Strict):
    """The settings of ``lap.PruningConfig`` that are not in the grid; see there.

    Hard concrete gates have their own bias and temperature, and logistic noise.
    """

    noise: str = "gumbel"
    beta: float = 5.0
    tau: float = 0.1
    hard_concrete_beta: float = 2.0
    hard_concrete_tau: Temperature = 2 / 3
    hard_concrete_signal_limit: PositiveOrInf | None = None
    gate_every: int = 2
    threshold: float = -1.0
    credit_nats: float = 10.0
    decoder_window: int | None = 5
    max_length: int = 512

    def __post_init__(self):
        self.config("published", "soft")
        self.config("published", "hard_concrete")

    def config(self, gate: str, training_mask: str) -> PruningConfig:
        """The model's settings at a point of the grid."""
        settings = dataclasses.asdict(self)
        own = {n: settings.pop(f"hard_concrete_{n}") for n in ("beta", "tau", "signal_limit")}
        if training_mask == "hard_concrete":
            settings |= {**own, "noise": "logistic"}
        if gate == "article":
            settings["noise"] = "none"
        return PruningConfig(gate=gate, training_mask=training_mask, **settings)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainerConfig):
    """One pass of Adam, as in the published code; lambda starts once the model copies its text.

    Attributes:
        steps, batch_texts: optimiser steps, and texts of each.
        warmup_steps: the learning rate rises over these, then stays, then falls to a tenth over the last
            ``decay_share`` of all steps.
        lambda_from_step: lambda is 0 before this step.
        lambda_below_nats: instead, if not null, lambda is 0 until the running mean of the cross-entropy has
            been below this. Until then gates do not act either.
        blind_steps: once gates act, they drop tokens at random for this many steps, as often as beta implies,
            and cost nothing. The decoder learns to do without any one token. Before that each token seems
            worth more than it is, and all gates open wide.
        lambda_ramp_steps: lambda rises from 0 over this many steps.
        lambda_zero_at_nats: lambda falls linearly with the running mean of the cross-entropy, and is 0 from
            this many nats on; null: it does not fall. A large lambda then closes as many gates as this
            quality allows, while a constant one closes none or all.
    """

    steps: Count
    batch_texts: Count = 20
    learning_rate: Positive = 1e-4
    warmup_steps: CountFrom0 = 0
    decay_share: Share = 0.0
    lambda_from_step: CountFrom0 = 500
    lambda_below_nats: float | None = None
    blind_steps: CountFrom0 = 0
    lambda_ramp_steps: CountFrom0 = 0
    lambda_zero_at_nats: Positive | None = None
    weight_decay: NotNegative = 0.0
    beta2: ShareBelow1 = 0.999
    length_warmup_steps: CountFrom0 = 0
    rates_by_size: bool = False
    compile: Annotated[bool, Must("false, because texts differ in length", lambda x: not x)] = False

    def __post_init__(self):
        for name in ("warmup_steps", "length_warmup_steps"):
            if (warmup := getattr(self, name)) > self.steps:
                raise ValueError(f"{name}: {warmup} are more than the {self.steps} steps; give fewer")


@dataclass(frozen=True)
class StartConfig(Strict):
    """Training of the run without gates, if the others start from its weights.

    The article's runs start from Flan-T5-small's weights in the same way. A missing key is as in
    ``training``.
    """

    steps: Count
    batch_texts: Count | None = None
    learning_rate: Positive | None = None
    warmup_steps: CountFrom0 | None = None
    decay_share: Share | None = None
    length_warmup_steps: CountFrom0 | None = None

    def training(self, other: TrainingConfig) -> TrainingConfig:
        """``other``, with the keys that are given here."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(other, **given)


@dataclass(frozen=True)
class MeasureConfig(Strict):
    """How much of the held-out text each quantity is measured on."""

    WHICH: ClassVar = ("main_run",)

    scored_texts: Count = 2000
    batch_texts: Count = 50
    probe_texts: Count = 2000  # of the training texts; tested on the held-out ones
    probe_epochs: Count = 20
    shap_texts: Count = 50  # long texts that are written again, beside five short ones that are drawn
    shap_shortest: Count = 60  # tokens of these
    shap_evaluations: Count = 400  # of the model, a text
    timed_lengths: Axis[Annotated[int, whole(4)]] = field(default_factory=lambda: [128, 512])
    timed_texts: Count = 16
    timing_repeats: Count = 5
    main_run: str | None = (
        None  # the run for measures of one model; default: the first with hard concrete gates
    )


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
                "data.vocabulary: a model from scratch needs one, and weights bring their own tokenizer"
            )
        if self.start is not None:
            if self.model.weights is not None:
                raise ValueError("start: model.weights already sets where the runs begin; remove one of them")
            try:
                self.start.training(self.training)
            except ValueError as error:
                raise ValueError(f"start.{error}") from None
