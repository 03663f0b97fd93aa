"""The run through an encoder's blocks with gates between them: soft in training, shorter at inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import gates as _gates
from .budget import check_protected, compact, keep_top, take, token_budgets
from .encoders import attention_received
from .methods import Seen


@dataclass
class Call:
    """What one call of the model says of its tokens.

    Attributes:
        valid, protected: (B, T) bool.
        ids: (B, T) integer, or None.
    """

    valid: Tensor
    protected: Tensor
    ids: Tensor | None


@dataclass
class GateRecord:
    """What one gate did in one call, at the places of the original sequence.

    Attributes:
        place: 0 is the input, l is after block l.
        scores: (B, T) float32, NaN for what was dropped before or is padding.
        kept: (B, T) bool: which tokens go on.
        z: (B, T) float: what they were multiplied by.
        budget: (B,) integer M.
        counted: (B, T) float: p, or P(z > 0), as the penalty counts it; None where nothing is learned.
    """

    place: int
    scores: Tensor
    kept: Tensor
    z: Tensor
    budget: Tensor
    counted: Tensor | None


class Pass:
    """One pass through the blocks; see ``Retention.run``.

    Args:
        retention: the ``Retention`` whose gates stand between the blocks.
    """

    def __init__(self, retention: nn.Module, layers: nn.ModuleList, hidden: Tensor, mask: Any, kwargs: dict):
        self.r, self.config, self.encoder = retention, retention.config, retention.encoder
        self.layers, self.hidden, self.mask, self.kwargs = layers, hidden, mask, kwargs
        self.phase = retention.phase
        call = retention._call
        if call is None:
            raise RuntimeError("the encoder must be called through the model that retain returned")
        batch, length = hidden.shape[:2]
        extra = length - call.valid.shape[1]  # Longformer fills up its window
        self.valid = nn.functional.pad(call.valid, (0, extra))
        self.protected = nn.functional.pad(call.protected, (0, extra)) & self.valid
        self.ids = None if call.ids is None else nn.functional.pad(call.ids, (0, extra))
        self.positions = torch.arange(length, device=hidden.device).expand(batch, length)
        self.global_ = None
        if self.encoder.windowed:
            self.global_ = mask > 0
            self.protected = (self.protected | self.global_) & self.valid
        self.lengths = self.valid.sum(1)
        if self._may_look():
            self._check_tokens()
        self.shape = hidden.shape
        self.c: Tensor | None = None  # (B, T): product of the z so far, where tokens stay in place
        self.expected: Tensor | None = None  # the same of p
        self.moved = False  # whether tokens have left their places
        self.held: Tensor | None = None  # states of what was dropped, for dropped="last"
        self.terms: list[Tensor] = []
        self.violations: list[Tensor] = []

    def _may_look(self) -> bool:
        """Whether the host may read values: always on a CPU, and at inference, which waits anyway."""
        return not torch.compiler.is_compiling() and (not self.r.training or self.hidden.device.type == "cpu")

    def _check_tokens(self) -> None:
        if not bool((self.lengths > 0).all()):
            row = int((self.lengths == 0).nonzero()[0, 0])
            raise ValueError(f"example {row} is all padding; leave it out")

    def run(self) -> Tensor:
        gate_at = {place: index for index, place in enumerate(self.r.places)}
        self.budgets = self._budgets()
        if 0 in gate_at:
            self._gate(gate_at[0], self.layers[0], self.hidden, self.valid)
        for number, block in enumerate(self.layers, 1):
            before, valid = self.hidden, self.valid
            self.hidden = self.encoder.run(block, self.hidden, self.mask, self.kwargs)
            if self.c is not None:
                self.hidden = self.hidden * self.c[..., None].to(self.hidden.dtype)
            if number in gate_at:
                self._gate(gate_at[number], block, before, valid)
        self._settle()
        return self._in_place()

    def _budgets(self) -> list[Tensor]:
        """M of each active gate."""
        places = self.r.all_places
        all_of_them = token_budgets(self.config, self.lengths, len(places))
        return [all_of_them[places.index(place)] for place in self.r.places]

    # ---- one gate ------------------------------------------------------------------------------

    def _gate(self, index: int, block: nn.Module, before: Tensor, valid_before: Tensor) -> None:
        gate, config = self.r.gates[index], self.config
        if self.phase == "open" and not config.is_learned:
            return  # nothing to learn, nothing to drop
        received = None
        if gate.needs_attention:
            with torch.no_grad():
                received = attention_received(
                    self.encoder,
                    block,
                    before,
                    valid_before,
                    self.r.model_config.num_attention_heads,
                    self.global_,
                )
        seen = Seen(self.hidden, self.valid, received, self.ids, self.positions)
        scores = gate(seen)
        if self._may_look() and bool((torch.isnan(scores) & self.valid).any()):
            raise ValueError(
                f"the scores of the gate at place {self.r.places[index]} are NaN: its input is, or its "
                "weights are"
            )
        budget = self.budgets[index]
        if self._may_look():
            budget = check_protected(self.protected, budget, config.over_budget)
        else:
            budget = torch.maximum(budget, self.protected.sum(1))
        free = self.valid & ~self.protected
        counted = None
        if config.is_learned:
            counted = torch.where(free, _gates.counted(config, scores), self.valid.to(scores.dtype))
        if self.r.training and config.is_learned:
            self._count(counted, budget, gate.extra_loss(scores, free))
        kept = self._chosen(gate, scores, seen, budget)
        z = self._soft(gate, scores, kept, free)
        if self.r._records is not None:
            self._record(index, scores, kept, z, budget, counted)
        if config.dropped == "last":
            self._hold()
        if self.phase in ("soft", "open"):
            self.c = z if self.c is None else self.c * z
            self._soften(z)
        elif self.phase == "straight" or (config.removal == "mask" and not self.encoder.windowed):
            self.valid = self.valid & kept
            self.c = z if self.c is None else self.c * z
            self.hidden = self.hidden * z[..., None].to(self.hidden.dtype)
            self.mask = self._block_mask(None)
        else:
            self._remove(kept)

    def _chosen(self, gate: nn.Module, scores: Tensor, seen: Seen, budget: Tensor) -> Tensor:
        """(B, T) bool: the tokens that inference keeps (Eq. 7, or the ablation's threshold)."""
        if self.config.selection == "threshold" and self.config.is_learned:
            return self.valid & ((torch.sigmoid(scores) > self.config.threshold) | self.protected)
        return keep_top(gate.ranking(scores, seen), self.valid, self.protected, budget)

    def _soft(self, gate: nn.Module, scores: Tensor, kept: Tensor, free: Tensor) -> Tensor:
        """(B, T) float32: what each token is multiplied by; 1 for protected ones."""
        if self.phase == "hard":
            return kept.float()
        if self.phase == "open":  # the tie gives the scorer a gradient, of zero, at every step
            z = 1 + 0 * scores
        else:
            z = gate.sample(scores)
            if self.phase == "straight":
                z = kept.float() + z - z.detach()
        closed = 0.0 if self.phase == "straight" else 1.0
        return torch.where(free, z, torch.where(self.valid, 1.0, closed))

    def _count(self, counted: Tensor, budget: Tensor, extra: Tensor | None) -> None:
        """The constraint of this gate, sum p - M, the mean of an example."""
        self.expected = counted if self.expected is None else self.expected * counted
        violation = self.expected.sum(1) - budget
        if self.config.unit == "share":
            violation = violation / self.lengths.clamp(min=1)
        self.violations.append(violation.mean())
        if extra is not None:
            self.terms.append(extra)

    def _settle(self) -> None:
        """The penalty of Eq. 5, and what the ascent will need."""
        if not self.violations:
            return
        violations, multiplier = torch.stack(self.violations), self.r.multiplier
        if self.phase == "open":
            self.r.penalty = (
                0 * violations.sum() + sum(0 * term for term in self.terms) + 0 * multiplier.sum()
            )
            return
        if self.config.multiplier == "joint":  # descent on -lambda violation is ascent on lambda
            value = multiplier.clamp(min=0) if self.config.constraint == "at_most" else multiplier
            penalty = (value.detach() * violations).sum() - (multiplier * violations.detach()).sum()
            penalty = penalty + (multiplier.detach() * violations.detach()).sum()
        else:
            penalty = (multiplier * violations).sum()
        self.r.penalty = penalty + sum(self.terms)
        if torch.is_grad_enabled():
            self.r._violations.append(violations.detach())

    # ---- what a gate does to the tensors ----------------------------------------------------------

    def _soften(self, z: Tensor) -> None:
        self.hidden = self.hidden * z[..., None].to(self.hidden.dtype)
        if self.config.gate_keys:
            self.mask = self._block_mask(torch.log(self.c.clamp(min=1e-6)))

    def _remove(self, kept: Tensor) -> None:
        """Gathers the kept tokens of each example into shorter tensors."""
        width = int(kept.sum(1).max())
        if width == self.valid.shape[1]:
            return
        if self.encoder.windowed:
            window = max(self.r.model_config.attention_window)
            width = -(-width // window) * window
            if self.config.removal == "mask":
                width = kept.shape[1]
            width = min(width, kept.shape[1])
        indices, valid = compact(kept, width)
        self.hidden = take(self.hidden, indices)
        self.positions = take(self.positions, indices)
        self.protected = take(self.protected, indices) & valid
        self.ids = None if self.ids is None else take(self.ids, indices)
        self.global_ = None if self.global_ is None else take(self.global_, indices) & valid
        self.valid, self.moved = valid, True
        self.mask = self._block_mask(None)

    def _block_mask(self, bias: Tensor | None) -> Any:
        """The attention mask of what is left, in the form that the blocks take.

        Args:
            bias: (B, T) float added to the attention that a token receives.
        """
        if self.encoder.windowed:
            if bias is not None:
                raise ValueError("gate_keys: windowed attention takes no bias; leave it off")
            limits = torch.finfo(self.hidden.dtype)
            mask = torch.zeros(self.valid.shape, dtype=self.hidden.dtype, device=self.hidden.device)
            return mask.masked_fill(self.global_, limits.max).masked_fill(~self.valid, limits.min)
        if bias is None:
            from transformers.masking_utils import create_bidirectional_mask

            return create_bidirectional_mask(
                config=self.r.model_config, inputs_embeds=self.hidden, attention_mask=self.valid.long()
            )
        implementation = self.r.model_config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise ValueError(f"gate_keys: needs attn_implementation sdpa or eager, not {implementation}")
        bias = bias.masked_fill(~self.valid, torch.finfo(torch.float32).min).to(self._attention_dtype())
        length = bias.shape[1]
        return bias[:, None, None].expand(-1, 1, length, length)

    def _attention_dtype(self) -> torch.dtype:
        kind = self.hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.hidden.dtype

    def _hold(self) -> None:
        """Keeps the states that tokens have when they come to a gate."""
        if self.moved:
            self.held = self._spread(self.held)
        elif self.c is None:
            self.held = self.hidden
        else:
            self.held = self.hidden + (1 - self.c[..., None]).to(self.hidden.dtype) * self.held

    def _spread(self, onto: Tensor | None) -> Tensor:
        """The states that are left, at their original places; others as in ``onto``, or 0."""
        # Filling goes to a place past the end, which is cut off.
        batch, length, width = self.shape
        onto = self.hidden.new_zeros(self.shape) if onto is None else onto.to(self.hidden.dtype)
        at = torch.where(self.valid, self.positions, length)[..., None].expand(-1, -1, width)
        return nn.functional.pad(onto, (0, 0, 0, 1)).scatter(1, at, self.hidden)[:, :length]

    def _in_place(self) -> Tensor:
        if self.moved:
            return self._spread(self.held)
        if self.c is not None and self.held is not None:
            return self.hidden + (1 - self.c[..., None]).to(self.hidden.dtype) * self.held
        return self.hidden

    def _record(self, index, scores, kept, z, budget, counted) -> None:
        batch, length = self.shape[:2]

        def spread(x: Tensor, filling: float | bool) -> Tensor:
            full = torch.full((batch, length + 1), filling, dtype=x.dtype, device=x.device)
            at = torch.where(self.valid, self.positions, length)
            return full.scatter(1, at, x)[:, : self.r._call.valid.shape[1]].detach()

        self.r._records.append(
            GateRecord(
                self.r.places[index],
                spread(scores, torch.nan),
                spread(kept, False),
                spread(z, 0.0),
                budget.detach(),
                None if counted is None else spread(counted, 0.0),
            )
        )
