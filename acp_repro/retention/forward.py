"""The run through an encoder's blocks with gates between them: soft in training, shorter at inference."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from . import gates as _gates
from . import key_bias
from .budget import check_protected, keep_top
from .encoders import attention_received
from .methods import Seen
from .removal import Call, GateRecord, Removal

# Before the first gate all tokens are there, so a block's inner states would set the peak of memory: at
# inference examples go through it in groups of so many tokens, which still fill a GPU, and in so many groups.
GROUP_TOKENS, MOST_GROUPS = 8192, 8


class Pass(Removal):
    """One pass through the blocks; see ``Retention.run``.

    On a GPU the host reads values at most once, at the start, where a mask was given (transformers waits
    there too) or more than [CLS] is protected; every later size follows from those numbers.

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
        filled = (lambda x: nn.functional.pad(x, (0, extra))) if extra else (lambda x: x)
        self.valid = filled(call.valid)
        self.protected = filled(call.protected)
        self.ids = None if call.ids is None else filled(call.ids)
        self.positions = torch.arange(length, device=hidden.device).expand(batch, length)
        self.global_ = None
        if self.encoder.windowed:
            self.global_ = mask > 0
            self.protected = (self.protected | self.global_) & self.valid
        self.shape, self.length = hidden.shape, call.valid.shape[1]
        self.all_valid, self.all_protected = self.valid, self.protected  # those of the whole sequence
        self.is_full = call.is_full and not extra  # whether all tokens are known to be valid
        self.host_budgets: list[list[int]] | None = None  # of each gate, M of each example
        self._read_lengths(call)
        self.c: Tensor | None = None  # (B, T): product of the z so far, where tokens stay in place
        self.expected: Tensor | None = None  # the same of p
        self.moved = False  # whether tokens have left their places
        self.slots: Tensor | None = None  # (B, T): where they went, if they left them once
        self.held: Tensor | None = None  # states of what was dropped, for dropped="last"
        self.biased = False  # whether ``mask`` is a bias on the keys
        self.terms: list[Tensor] = []
        self.violations: list[Tensor] = []

    def _read_lengths(self, call: Call) -> None:
        """Fills ``host_budgets`` and ``is_full``, as far as the host may know.

        Raises:
            ValueError: an example is all padding, or protects more than its budget.
        """
        self.more = call.protects_more or self.encoder.windowed
        self.protects_first = self.is_full and not self.more  # and it stays the first
        if call.is_full and not self.more:
            lengths, needs = [self.length] * self.shape[0], [min(1, self.length)] * self.shape[0]
        elif self._may_look():
            lengths, needs = torch.stack([self.lengths, self.needed]).tolist()
            self.is_full = min(lengths) == self.valid.shape[1]
        else:
            return
        if 0 in lengths:
            raise ValueError(f"example {lengths.index(0)} is all padding; leave it out")
        of_length = {n: self.r.budgets(n) for n in set(lengths)}
        self.host_budgets = [[of_length[n][gate] for n in lengths] for gate in range(len(self.r.places))]
        if self.config.over_budget == "error":
            for budgets in self.host_budgets:
                check_protected(needs, budgets)
        self.host_budgets = [
            [max(m, n) for m, n in zip(each, needs, strict=True)] for each in self.host_budgets
        ]

    @property
    def lengths(self) -> Tensor:
        """(B,) integer: tokens of each example at the start."""
        return self.all_valid.sum(1)

    @property
    def needed(self) -> Tensor:
        """(B,) integer: how many of them are protected."""
        return self.all_protected.sum(1) if self.more else self.lengths.clamp(max=1)

    def _may_look(self) -> bool:
        """Whether the host may read values. In training on a GPU only where a baseline's sizes need it."""
        if torch.compiler.is_compiling():
            return False
        if self.hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return self.phase == "hard" or not self.hidden.is_cuda

    def _budget(self, gate: int) -> Tensor:
        """(B,) integer M of a gate, with what is protected beyond."""
        return torch.maximum(self.r.budgets(self.lengths)[gate], self.needed)

    def run(self) -> Tensor:
        gate_at = {place: index for index, place in enumerate(self.r.places)}
        if 0 in gate_at:
            self._gate(gate_at[0], self.layers[0], self.hidden, self.valid)
        size = 0 if 0 in gate_at else self._group_size()
        for number in range(1, len(self.layers) + 1):
            self._block(number, gate_at.get(number), size)
            size = 0 if number in gate_at else size
        self._settle()
        return self._in_place()

    def _block(self, number: int, gate: int | None, size: int) -> None:
        """A block, ``size`` examples at a time (0: all at once), and the gate after it."""
        block = self.layers[number - 1]
        looks_back = gate is not None and self.r.gates[gate].needs_attention
        before = (self.hidden, self.valid) if looks_back else (None, None)
        if size:
            self.hidden = self._in_groups(block, size)
        else:
            with self._attention():
                self.hidden = self.encoder.run(block, self.hidden, self.mask, self.kwargs)
        if self.c is not None:
            self.hidden = self.hidden * self.c[..., None].to(self.hidden.dtype)
        if gate is not None:
            self._gate(gate, block, *before)

    def _attention(self) -> contextlib.AbstractContextManager:
        """What blocks attend by: their own, but where ``mask`` is a bias on the keys."""
        biased = self.biased and self.r.model_config._attn_implementation == "sdpa"
        return key_bias.used_by(self.r.model_config) if biased else contextlib.nullcontext()

    def _group_size(self) -> int:
        """Examples of a group up to the first gate; 0 for all at once."""
        batch, length = self.shape[:2]
        size = max(GROUP_TOKENS // length, batch // MOST_GROUPS, 1)
        plain = self.phase == "hard" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        tensors = any(isinstance(value, Tensor) for value in self.kwargs.values())
        gathers = self.config.removal == "gather" and not self.encoder.windowed
        return size if plain and gathers and not tensors and size < batch else 0

    def _in_groups(self, block: nn.Module, size: int) -> Tensor:
        """The block's output, group after group of ``size`` examples: its inner states are those of one."""
        out, sliced = None, isinstance(self.mask, Tensor) and self.mask.shape[0] > 1
        for first in range(0, self.shape[0], size):
            rows = slice(first, first + size)
            mask = self.mask[rows] if sliced else self.mask
            part = self.encoder.run(block, self.hidden[rows], mask, self.kwargs)
            out = part.new_empty(self.shape) if out is None else out
            out[rows] = part
        return out

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
        valid = None if self.is_full else self.valid
        seen = Seen(self.hidden, self.valid, received, self.ids, self.positions, self.is_full)
        scores = gate(seen)
        by_index = self._gathers_by_index()
        ranking = gate.ranking(scores, seen) if by_index else None
        in_kernel = by_index and self._selects_in_kernel(ranking)
        if not in_kernel or ranking is not scores:  # the kernel looks for them itself
            self._note_nan(index, scores, valid)
        counted = None
        if config.is_learned and (self.r.training or self.r._records is not None):
            counted = torch.where(self._free(), _gates.counted(config, scores), self.valid.to(scores.dtype))
        if self.r.training and config.is_learned:
            self._count(counted, self._budget(index), gate.extra_loss(scores, self._free()))
        if by_index:
            if config.dropped == "last":
                self._hold()
            self._remove_by_index(index, ranking, scores, counted, in_kernel)
            return
        budget = self._budget(index)
        kept = self._chosen(gate, scores, seen, budget)
        z = self._soft(gate, scores, kept, self._free())
        if self.r._records is not None:
            self._record(index, scores, kept, z, budget, counted)
        if config.dropped == "last":
            self._hold()
        if self.phase in ("soft", "open"):
            self.c = z if self.c is None else self.c * z
            self._soften(z)
        elif self.phase == "straight" or (config.removal == "mask" and not self.encoder.windowed):
            self.valid, self.is_full = self.valid & kept, False
            self.c = z if self.c is None else self.c * z
            self.hidden = self.hidden * z[..., None].to(self.hidden.dtype)
            self.mask = self._block_mask(None)
        else:
            self._remove(kept)

    def _free(self) -> Tensor:
        """(B, T) bool: the tokens that may be dropped."""
        return self.valid & ~self.protected

    def _gathers_by_index(self) -> bool:
        """Whether the tokens to keep are known as indices of a known number, without a mask between."""
        learned_threshold = self.config.selection == "threshold" and self.config.is_learned
        gathers = self.config.removal == "gather" and not self.encoder.windowed
        return self.phase == "hard" and gathers and not learned_threshold

    def _note_nan(self, index: int, scores: Tensor, valid: Tensor | None) -> None:
        """Raises at once on a CPU; on a GPU ``Retention.during`` looks once all is launched."""
        if torch.compiler.is_compiling() or (self.r.training and scores.is_cuda):
            return
        found = torch.isnan(scores) if valid is None else torch.isnan(scores) & valid
        self.r._suspects.append((self.r.places[index], found.any()))
        if not scores.is_cuda:
            self.r.raise_suspects()

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
        penalty = penalty + 0.5 * self.config.augmentation * violations.square().sum()
        self.r.penalty = penalty + sum(self.terms)
        if torch.is_grad_enabled():
            self.r._violations.append(violations.detach())

    def _soften(self, z: Tensor) -> None:
        self.hidden = self.hidden * z[..., None].to(self.hidden.dtype)
        if self.config.gate_keys:
            self.mask, self.biased = self._block_mask(torch.log(self.c.clamp(min=1e-6))), True

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
