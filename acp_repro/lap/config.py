"""The pruning settings of a T5: gates, masks and decoder. Imports only the standard library."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from acp_repro.common.bounds import Count, CountFrom0, Finite, PositiveOrInf, check, number
from acp_repro.common.errors import UsageError

Gate = Literal["published", "article"]
TrainingMask = Literal["soft", "straight_through", "hard_concrete"]
GATES, TRAINING_MASKS = get_args(Gate), get_args(TrainingMask)
_TEMPERATURE = (
    "a finite number above 0, because it divides (for hard gates take training_mask: straight_through)"
)
Temperature = Annotated[float, number(_TEMPERATURE, lambda x: 0 < x < math.inf)]
LOG_REMOVED = -60.0  # replaces log 0 in a straight-through mask, because -inf has no gradient


class PruningError(UsageError):
    """A setting, a text or a checkpoint is wrong; the message states a correct value."""


@dataclass(frozen=True)
class PruningConfig:
    """The settings of learnable attention pruning, with the defaults of the published code.

    Attributes:
        gate: ``published``: the log gate is logsigmoid((E[0] + noise + beta) / tau); ``article``: the log
            gate is logsigmoid(E[0] / tau + beta), without noise.
        noise: added to E[0] in training only: ``gumbel`` (the published code, mean 0.58), ``logistic``
            (symmetric around 0), or ``none``.
        beta, tau: bias and temperature of the gate. With 5 and 0.1 the gate starts saturated: logsigmoid(50)
            has no gradient.
        signal_limit: with hard concrete gates, the bound on E[0], applied as E[0] / (1 + |E[0]| / limit),
            whose slope falls slowly. Without a limit, a wide open gate has no gradient that could close it.
        gate_every: n; the encoder blocks 0, n, 2n ... end in a gate.
        threshold: at evaluation, a token is kept if its log gate exceeds this value.
        training_mask: the mask that training adds to attention scores. ``soft``: the log gates, as in the
            article. ``straight_through``: tokens are removed as at evaluation, with the gradient of the soft
            mask, so that training matches evaluation. ``hard_concrete``: log gates are added. Gates are
            stretched from (0, 1) to (-0.1, 1.1) and clipped, so a gate is often exactly 0 and removes its
            token (Louizos, Welling and Kingma, 2018). A token costs the probability that its gate is not 0.
            This mask needs logistic noise; tau is that paper's beta.
        credit_nats: with ``straight_through``, a bound on the gradient of one token's gate: the maximum value
            of a token, in nats of the text's cross-entropy.
        decoder_window: number of earlier tokens that a decoder layer attends to; None for all.
        max_length: the maximum number of tokens in a text, EOS included.
    """

    gate: Gate = "published"
    noise: Literal["gumbel", "logistic", "none"] = "gumbel"
    beta: Finite = 5.0
    tau: Temperature = 0.1
    signal_limit: PositiveOrInf | None = None
    gate_every: Count = 2
    threshold: Annotated[float, number("a number below 0, as log gates are", lambda x: x < 0)] = -1.0
    training_mask: TrainingMask = "soft"
    credit_nats: PositiveOrInf = 10.0
    decoder_window: CountFrom0 | None = 5
    max_length: Count = 512

    def __post_init__(self):
        try:
            check(self)
        except ValueError as error:
            raise PruningError(str(error)) from None
        if self.gate == "article" and self.noise != "none":
            raise PruningError("noise: gate: article supports no noise; set noise: none")
        if self.training_mask == "hard_concrete" and (self.gate, self.noise) != ("published", "logistic"):
            raise PruningError("training_mask: hard_concrete needs gate: published and noise: logistic")
        if self.signal_limit is not None and self.training_mask != "hard_concrete":
            raise PruningError("signal_limit: needs training_mask: hard_concrete; remove it")

    @property
    def log_threshold(self) -> float:
        """The log gate above which a token is kept; a hard concrete gate keeps a token unless it is 0."""
        return -math.inf if self.training_mask == "hard_concrete" else self.threshold

    def gated_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """The 0-based indices of the encoder blocks that end in a gate."""
        return tuple(range(0, num_blocks, self.gate_every))
