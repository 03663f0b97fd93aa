"""The gates of an encoder with their budget, their weights and the multiplier updates (Eq. 4 and 5)."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .budget import Length, active_gates, token_budgets
from .config import RetentionConfig
from .encoders import Encoder
from .gates import GATES, Gate
from .scorer import wide


@dataclass
class Call:
    """The tokens of one call of the model.

    Attributes:
        valid, protected: (B, T) bool.
        ids: (B, T) integer, or None.
        is_full: whether no mask was given, so that all tokens are valid.
        protects_more: whether tokens after the first may be protected.
    """

    valid: Tensor
    protected: Tensor
    ids: Tensor | None
    is_full: bool = False
    protects_more: bool = True

    @property
    def lengths(self) -> Tensor:
        """(B,) integer: number of tokens in each example."""
        return self.valid.sum(1)

    @property
    def needed(self) -> Tensor:
        """(B,) integer: number of protected tokens in each example."""
        return self.protected.sum(1) if self.protects_more else self.lengths.clamp(max=1)

    @property
    def protects_first(self) -> bool:
        """Whether the first token is known to be the only protected token."""
        return self.is_full and not self.protects_more


@dataclass
class GateRecord:
    """The result of one gate in one call, at the original positions of the sequence.

    Attributes:
        place: 0 is the input, l is after block l.
        scores: (B, T) float32, NaN for padding and for tokens that an earlier gate dropped.
        kept: (B, T) bool: the kept tokens.
        z: (B, T) float: the factor of each token.
        budget: (B,) integer M.
        counted: (B, T) float: p or P(z > 0), whichever the penalty uses; None for methods without learning.
    """

    place: int
    scores: Tensor
    kept: Tensor
    z: Tensor
    budget: Tensor
    counted: Tensor | None


class Retention(nn.Module):
    """The gates of one encoder with their budget; the attribute ``retention`` of the encoder.

    Attributes:
        config: the settings; change them with :meth:`configure`.
        places: the places of the gates that can drop tokens.
        multiplier: (gates,) float32: lambda of Eq. 4, one per gate.
        step: the training step, set by the training loop, for ``open_steps`` and ``hard_from_step``.
        penalty: the budget term of the last training loss, a float32 scalar; None before the first one.
    """

    multiplier: Tensor
    gates: Sequence[Gate]  # an nn.ModuleList

    def __init__(self, config: RetentionConfig, encoder: Encoder, model_config: Any, num_layers: int):
        super().__init__()
        self.config, self.encoder, self.model_config = config, encoder, model_config
        self.num_layers = num_layers
        self.all_places = config.places(num_layers)
        self.places = active_gates(config, self.all_places)
        hidden_size = model_config.hidden_size
        gates = nn.ModuleList(GATES[config.method](config, hidden_size) for _ in self.places)
        self.gates = cast(Any, gates)
        start = torch.full((len(self.places),), float(config.initial_multiplier))
        if config.is_learned and config.multiplier == "joint":
            self.multiplier = nn.Parameter(start)
        else:
            self.register_buffer("multiplier", start)
        self.step = 0
        self.penalty: Tensor | None = None
        self._violations: list[Tensor] = []
        self._find_call: Callable[[], Call] | None = None
        self._records: list[GateRecord] | None = None
        self._nan_checks: list[tuple[int, Tensor]] = []  # places, and whether their scores contain NaN

    def configure(self, **changes: Any) -> None:
        """Changes settings that are independent of weights, such as ``budget``, ``selection`` or ``removal``.

        Raises:
            ValueError: a value is not allowed, or the change needs gates at other places or of another kind.
        """
        config = dataclasses.replace(self.config, **changes)
        places = active_gates(config, config.places(self.num_layers))
        fixed = ("method", "scorer_width", "ranks")
        if places != self.places or any(getattr(config, n) != getattr(self.config, n) for n in fixed):
            raise ValueError(f"these gates cannot change to {changes}; call retain on the dense model")
        self.config = config
        self.model_config.retention = config.as_dict()  # save_pretrained writes it
        for gate in self.gates:
            gate.config = config

    @property
    def phase(self) -> str:
        """``soft``, ``open`` or ``straight`` in training, else ``hard``."""
        config = self.config
        if self.training and self.step < config.open_steps:
            return "open"
        if not self.training or not config.is_learned:
            return "hard"
        late = config.hard_from_step is not None and self.step >= config.hard_from_step
        return "straight" if late else "soft"

    def take_violation(self) -> Tensor:
        """(gates,) float32: sum p - M in the config's unit, averaged over the passes since the last call."""
        violation = torch.zeros_like(self.multiplier)
        if self._violations:
            violation = torch.stack(self._violations).mean(0).to(self.multiplier)
        self._violations.clear()
        return violation.detach()

    @torch.no_grad()
    def ascend(self, violation: Tensor | None = None) -> Tensor:
        """Projected ascent after a step (Eq. 4): lambda = max(0, lambda + eta (sum p - M)).

        Args:
            violation: (gates,) float32, such as the mean over ranks; default: :meth:`take_violation`.

        Returns:
            The violation.
        """
        config, violation = self.config, self.take_violation() if violation is None else violation
        if config.is_learned and self.phase != "open":
            self.multiplier.data = wide(self.multiplier.data)  # in bfloat16, small steps would round to 0
            if config.multiplier == "ascent":
                self.multiplier += config.multiplier_step * violation
            if config.multiplier != "fixed" and config.constraint == "at_most":
                self.multiplier.clamp_(min=0)
        return violation

    def budgets(self, lengths: Length) -> list[Length]:
        """M of each gate that can drop tokens, for examples of the given lengths, an int or (B,) integer."""
        budgets = token_budgets(self.config, lengths, len(self.all_places))
        return [budgets[self.all_places.index(place)] for place in self.places]

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the model is dense."""
        places, self.places = self.places, ()
        try:
            yield
        finally:
            self.places = places

    @contextlib.contextmanager
    def hold_call(self, find: Callable[[], Call]) -> Iterator[None]:
        """A context in which the gates can find the tokens of one call of the model.

        Raises:
            ValueError: the scores of a gate were NaN. A GPU is synchronised only after the call.
        """
        self._find_call, self.penalty = find, None
        self._nan_checks.clear()
        try:
            yield
        finally:
            self._find_call = None
        if not (self.multiplier.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.raise_if_nan()

    def raise_if_nan(self) -> None:
        """Raises ValueError if the scores of a gate were NaN in this call."""
        checks, self._nan_checks = self._nan_checks, []
        found = torch.stack([is_nan for _, is_nan in checks]).tolist() if checks else []
        if True in found:
            place = checks[found.index(True)][0]
            raise ValueError(
                f"the scores of the gate at place {place} are NaN; check its weights and input states"
            )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[GateRecord]]:
        """A context that records the result of every gate in each call."""
        before, self._records = self._records, []
        try:
            yield self._records
        finally:
            self._records = before
