"""Runs an encoder's blocks and gates: soft gates in training, hard token removal at inference.

On a GPU the host synchronises at most once, at the start, and only if a mask was given (transformers then
synchronises too) or more than [CLS] is protected. All later sizes are derived from the values read then.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from . import key_bias, removal
from .budget import keep_top
from .encoders import attention_received
from .gates import Gate, counted_share
from .removal import State, spread_states
from .retention import Call, GateRecord, Retention

# Before the first gate no token is dropped, so a block's inner states would determine peak memory. At
# inference the blocks process examples in groups of this many tokens, which still fill a GPU, and in at most
# this many groups.
GROUP_TOKENS, MOST_GROUPS = 8192, 8


def run(
    retention: Retention, layers: nn.ModuleList, hidden: Tensor, mask: Any, kwargs: dict[str, Any]
) -> Tensor:
    """Runs all blocks with the gates of ``retention`` between them.

    Args:
        hidden: (B, T, D) embeddings.
        mask: the attention mask that the model built for its blocks.

    Returns:
        (B, T, D) in the dtype of ``hidden``, at the original positions.
    """
    state = begin(retention, hidden, mask)
    gate_at = {place: index for index, place in enumerate(retention.places)}
    if 0 in gate_at:
        pass_gate(state, gate_at[0], layers[0], (state.hidden, state.valid))
    size = 0 if 0 in gate_at else group_size(state, kwargs)
    for number, block in enumerate(layers, 1):
        index = gate_at.get(number)
        looks_back = index is not None and retention.gates[index].needs_attention
        before = (state.hidden, state.valid) if looks_back else None
        run_block(state, block, kwargs, size)
        if index is not None:
            pass_gate(state, index, block, before)
            size = 0
    set_penalty(state)
    return spread_states(state)


def begin(retention: Retention, hidden: Tensor, mask: Any) -> State:
    """The state before the first block, from embeddings (B, T, D) in any floating dtype."""
    find, windowed = retention._find_call, retention.encoder.windowed
    if find is None:
        raise RuntimeError("the encoder was called directly; call the model that retain returned")
    call, (batch, length) = find(), hidden.shape[:2]
    extra = length - call.valid.shape[1]  # Longformer pads to a multiple of its window
    valid, protected, ids = call.valid, call.protected, call.ids
    if extra:
        valid, protected = (nn.functional.pad(x, (0, extra)) for x in (valid, protected))
        ids = None if ids is None else nn.functional.pad(ids, (0, extra))
    global_ = mask > 0 if windowed else None
    if global_ is not None:
        protected = (protected | global_) & valid
    call = Call(valid, protected, ids, call.is_full and not extra, call.protects_more or windowed)
    budgets, is_full = host_budgets(retention, call)
    return State(
        retention=retention,
        call=call,
        budgets=budgets,
        shape=hidden.shape,
        given=length - extra,
        hidden=hidden,
        valid=valid,
        received=None,
        ids=ids,
        positions=torch.arange(length, device=hidden.device).expand(batch, length),
        is_full=is_full,
        protected=protected,
        global_=global_,
        mask=mask,
    )


def host_budgets(retention: Retention, call: Call) -> tuple[list[list[int]] | None, bool]:
    """(M of each gate for each example, whether all tokens are valid), if the host may read them."""
    (batch, length), cuda = call.valid.shape, call.valid.is_cuda
    if call.protects_first:
        lengths, needs = [length] * batch, [min(1, length)] * batch
    elif not (torch.compiler.is_compiling() or (cuda and torch.cuda.is_current_stream_capturing())) and (
        retention.phase == "hard" or not cuda  # in training on a GPU, only if a baseline's sizes need it
    ):
        lengths, needs = torch.stack([call.lengths, call.needed]).tolist()
    else:
        return None, call.is_full
    if 0 in lengths:
        raise ValueError(f"example {lengths.index(0)} contains only padding; remove it")
    by_length = {n: retention.budgets(n) for n in set(lengths)}
    by_gate = [[by_length[n][gate] for n in lengths] for gate in range(len(retention.places))]
    if retention.config.over_budget == "error":
        for row, (need, most) in enumerate(zip(needs, by_gate[-1], strict=True)):  # non-increasing
            if need > most:
                raise ValueError(
                    f"example {row}: {need} protected tokens exceed its budget of {most}; raise "
                    "budget, protect fewer, or set over_budget='keep'"
                )
    by_gate = [[max(m, n) for m, n in zip(each, needs, strict=True)] for each in by_gate]
    return by_gate, min(lengths) == length


# ---- blocks ------------------------------------------------------------------------------------


def run_block(state: State, block: nn.Module, kwargs: dict, size: int) -> None:
    """Runs a block on ``size`` examples at a time (0: all at once)."""
    retention = state.retention
    if size:
        state.hidden = run_groups(state, block, kwargs, size)
    else:
        # With the block's own attention, unless ``mask`` is a bias on the keys.
        biased = state.biased and retention.model_config._attn_implementation == "sdpa"
        with key_bias.use_key_bias(retention.model_config) if biased else contextlib.nullcontext():
            state.hidden = retention.encoder.run(block, state.hidden, state.mask, kwargs)
    if state.c is not None:
        state.hidden = _scale_states(state.hidden, state.c)


def group_size(state: State, kwargs: dict) -> int:
    """The number of examples in a group up to the first gate; 0 for all at once."""
    retention, (batch, length) = state.retention, state.shape[:2]
    size = max(GROUP_TOKENS // length, batch // MOST_GROUPS, 1)
    plain = retention.phase == "hard" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    tensors = any(isinstance(value, Tensor) for value in kwargs.values())
    return size if plain and _gathers(retention) and not tensors and size < batch else 0


def run_groups(state: State, block: nn.Module, kwargs: dict, size: int) -> Tensor:
    """The block's output (B, T, D), computed ``size`` examples at a time to limit the inner states."""
    out, mask = None, state.mask
    sliced = isinstance(mask, Tensor) and mask.shape[0] > 1
    for first in range(0, state.shape[0], size):
        rows = slice(first, first + size)
        part = state.retention.encoder.run(block, state.hidden[rows], mask[rows] if sliced else mask, kwargs)
        out = part.new_empty(state.shape) if out is None else out
        out[rows] = part
    assert out is not None
    return out


def _gathers(retention: Retention) -> bool:
    return retention.config.removal == "gather" and not retention.encoder.windowed


def _scale_states(hidden: Tensor, z: Tensor) -> Tensor:
    return hidden * z[..., None].to(hidden.dtype)


# ---- one gate ----------------------------------------------------------------------------------


def pass_gate(state: State, index: int, block: nn.Module, before: tuple[Tensor, Tensor] | None) -> None:
    """Scores the tokens (B, T), then multiplies, masks or removes them.

    Args:
        block: the block before the gate.
        before: the input (B, T, D) of ``block`` and its valid tokens, (B, T) bool, if the gate needs them.
    """
    retention, config, phase = state.retention, state.retention.config, state.retention.phase
    gate = retention.gates[index]
    if phase == "open" and not config.is_learned:
        return  # nothing to learn, nothing to drop
    if gate.needs_attention:
        assert before is not None
        heads = retention.model_config.num_attention_heads
        with torch.no_grad():
            state.received = attention_received(retention.encoder, block, *before, heads, state.global_)
    scores = gate(state)
    by_threshold = config.selection == "threshold" and config.is_learned
    # Whether the kept tokens are selected as indices, in known number, without an intermediate mask.
    by_index = phase == "hard" and _gathers(retention) and not by_threshold
    ranking = scores if by_threshold else gate.rank_values(scores, state)
    if not by_index or not removal.selects_in_kernel(ranking) or ranking is not scores:
        note_nan(state, index, scores)  # otherwise the selection kernel detects NaN
    counted = None
    if config.is_learned and (retention.training or retention._records is not None):
        free = state.valid & ~state.protected
        counted = torch.where(free, counted_share(config, scores), state.valid.to(scores.dtype))
        if retention.training:
            extra = gate.extra_loss(scores, free)
            add_violation(state, index, counted)
            state.terms += [] if extra is None else [extra]
    kept = z = places = None
    if by_index:
        places = removal.find_places(state, index, ranking)
        if retention._records is not None:
            kept = places.kept(state.valid)
            z = kept.float()
    else:
        if by_threshold:  # the ablation
            kept = state.valid & ((torch.sigmoid(scores) > config.threshold) | state.protected)
        else:
            kept = keep_top(ranking, state.valid, state.protected, state.budget(index))
        z = kept.float() if phase == "hard" else sample_z(state, gate, scores, kept)
    if retention._records is not None:
        assert kept is not None and z is not None
        record_gate(state, index, scores, kept, z, counted)
    if config.dropped == "last":
        state.held = spread_states(state)
    if places is not None:
        removal.gather(state, places)
        return
    assert kept is not None and z is not None
    if phase in ("soft", "open"):
        state.c = z if state.c is None else state.c * z
        state.hidden = _scale_states(state.hidden, z)
        if config.gate_keys:
            state.mask, state.biased = removal.biased_mask(state, torch.log(state.c.clamp(min=1e-6))), True
    elif phase == "straight" or (config.removal == "mask" and not retention.encoder.windowed):
        state.valid, state.is_full = state.valid & kept, False
        state.c = z if state.c is None else state.c * z
        state.hidden = _scale_states(state.hidden, z)
        state.mask = removal.block_mask(state)
    else:
        removal.gather_kept(state, kept)


def note_nan(state: State, index: int, scores: Tensor) -> None:
    """Records NaN in ``scores`` (B, T); raised at once on a CPU, after the last launch on a GPU."""
    retention = state.retention
    if torch.compiler.is_compiling() or (retention.training and scores.is_cuda):
        return
    found = torch.isnan(scores) if state.is_full else torch.isnan(scores) & state.valid
    retention._nan_checks.append((retention.places[index], found.any()))
    if not scores.is_cuda:
        retention.raise_if_nan()


def sample_z(state: State, gate: Gate, scores: Tensor, kept: Tensor) -> Tensor:
    """(B, T) float32: the factor of each token in training; 1 for protected tokens."""
    phase = state.retention.phase
    if phase == "open":  # a zero gradient at every step, so that the scorer never counts as unused
        z = 1 + 0 * scores
    else:
        z = gate.sample(scores)
        if phase == "straight":
            z = kept.float() + z - z.detach()
    closed = 0.0 if phase == "straight" else 1.0
    return torch.where(state.valid & ~state.protected, z, torch.where(state.valid, 1.0, closed))


def record_gate(
    state: State, index: int, scores: Tensor, kept: Tensor, z: Tensor, counted: Tensor | None
) -> None:
    """Adds the gate's scores (B, T) float32 and selection, at the original positions, to ``recorded``."""
    retention, (batch, length) = state.retention, state.shape[:2]
    assert retention._records is not None

    def spread(x: Tensor, filling: float | bool) -> Tensor:
        full = torch.full((batch, length + 1), filling, dtype=x.dtype, device=x.device)
        at = torch.where(state.valid, state.positions, length)
        return full.scatter(1, at, x)[:, : state.given].detach()

    retention._records.append(
        GateRecord(
            retention.places[index],
            spread(scores, torch.nan),
            spread(kept, False),
            spread(z, 0.0),
            state.budget(index).detach(),
            None if counted is None else spread(counted, 0.0),
        )
    )


# ---- the penalty -------------------------------------------------------------------------------


def add_violation(state: State, index: int, counted: Tensor) -> None:
    """The constraint of a gate, sum p - M, averaged over examples; ``counted`` is (B, T) float."""
    state.expected = counted if state.expected is None else state.expected * counted
    violation = state.expected.sum(1) - state.budget(index)
    if state.retention.config.unit == "share":
        violation = violation / state.call.lengths.clamp(min=1)
    state.violations.append(violation.mean())


def set_penalty(state: State) -> None:
    """Computes the penalty of Eq. 5, and the violations for the ascent."""
    retention, config = state.retention, state.retention.config
    if not state.violations:
        return
    violations, multiplier = torch.stack(state.violations), retention.multiplier
    if config.multiplier == "joint":  # descent on -lambda violation is ascent on lambda
        value = multiplier.clamp(min=0) if config.constraint == "at_most" else multiplier
        penalty = (value.detach() * violations).sum() - (multiplier * violations.detach()).sum()
        penalty = penalty + (multiplier.detach() * violations.detach()).sum()
    else:
        penalty = (multiplier * violations).sum()
    penalty = penalty + 0.5 * config.augmentation * violations.square().sum() + sum(state.terms)
    is_open = retention.phase == "open"
    retention.penalty = 0 * penalty if is_open else penalty
    if torch.is_grad_enabled() and not is_open:
        retention._violations.append(violations.detach())
