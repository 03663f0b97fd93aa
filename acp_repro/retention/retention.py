"""The gates of an encoder with their budget: their weights, and the updates of the multiplier (Eq. 4 and
5)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
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
        protects_more: whether more than the first token may be protected.
    """

    valid: Tensor
    protected: Tensor
    ids: Tensor | None
    is_full: bool = False
    protects_more: bool = True

    @property
    def lengths(self) -> Tensor:
        """(B,) integer: tokens of each example."""
        return self.valid.sum(1)

    @property
    def needed(self) -> Tensor:
        """(B,) integer: protected tokens of each example."""
        return self.protected.sum(1) if self.protects_more else self.lengths.clamp(max=1)

    @property
    def protects_first(self) -> bool:
        """Whether the first token, and no other, is known to be protected."""
        return self.is_full and not self.protects_more


@dataclass
class GateRecord:
    """What one gate did in one call, at the places of the original sequence.

    Attributes:
        place: 0 is the input, l is after block l.
        scores: (B, T) float32, NaN for padding and for tokens dropped before.
        kept: (B, T) bool: the tokens that are kept.
        z: (B, T) float: the factor of each token.
        budget: (B,) integer M.
        counted: (B, T) float: p, or P(z > 0), as the penalty counts it; None if nothing is learned.
    """

    place: int
    scores: Tensor
    kept: Tensor
    z: Tensor
    budget: Tensor
    counted: Tensor | None


class Retention(nn.Module):
    """The gates of one encoder with their budget; ``retention`` of the encoder.

    Attributes:
        config: the settings; change them with :meth:`configure`.
        places: of the gates that can drop something.
        multiplier: (gates,) float32: lambda of Eq. 4, one a gate.
        step: step of the training, for ``open_steps`` and ``hard_from_step``; the training loop sets it.
        penalty: the budget's share of the last training loss, a float32 scalar; None before.
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
        self._call: Call | None = None
        self._records: list[GateRecord] | None = None
        self._nan_checks: list[tuple[int, Tensor]] = []  # places, and whether their scores hold a NaN

    def configure(self, **changes: Any) -> None:
        """Changes settings that need no other weights, such as ``budget``, ``selection`` or ``removal``.

        Raises:
            ValueError: a value is not allowed, or gates would be elsewhere or of another kind.
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
        """(gates,) float32: sum p - M in the config's unit, the mean of the passes since the last call."""
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
            self.multiplier.data = wide(self.multiplier.data)  # small steps would round to 0 in bfloat16
            if config.multiplier == "ascent":
                self.multiplier += config.multiplier_step * violation
            if config.multiplier != "fixed" and config.constraint == "at_most":
                self.multiplier.clamp_(min=0)
        return violation

    def budgets(self, lengths: Length) -> list[Length]:
        """M of each gate that can drop something, for examples of so many tokens, an int or (B,) integer."""
        budgets = token_budgets(self.config, lengths, len(self.all_places))
        return [budgets[self.all_places.index(place)] for place in self.places]

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model is dense."""
        places, self.places = self.places, ()
        try:
            yield
        finally:
            self.places = places

    @contextlib.contextmanager
    def hold_call(self, call: Call) -> Iterator[None]:
        """Inside, the gates have access to the tokens of one call of the model.

        Raises:
            ValueError: scores of a gate were NaN. A GPU is waited for after the call alone.
        """
        self._call, self.penalty = call, None
        self._nan_checks.clear()
        try:
            yield
        finally:
            self._call = None
        if not (call.valid.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.raise_if_nan()

    def raise_if_nan(self) -> None:
        """Raises ValueError if the scores of a gate were NaN in this call."""
        checks, self._nan_checks = self._nan_checks, []
        found = torch.stack([is_nan for _, is_nan in checks]).tolist() if checks else []
        if True in found:
            place = checks[found.index(True)][0]
            raise ValueError(
                f"the scores of the gate at place {place} are NaN: its input or weights hold NaN"
            )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[GateRecord]]:
        """Collects what every gate does in the calls inside."""
        before, self._records = self._records, []
        try:
            yield self._records
        finally:
            self._records = before
