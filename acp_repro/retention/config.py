"""The settings of token retention, one for each choice that the paper leaves open. Does not import torch."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from acp_repro.common.bounds import (
    Count,
    CountFrom0,
    Finite,
    Must,
    NotNegative,
    Positive,
    Share,
    check,
    number,
    within,
)
from acp_repro.common.errors import did_you_mean

LEARNED = ("adaptive", "top", "infor_coef")
# The encoders of transformers that `encoders` registers, by ``model_type``.
LIKE_BERT = ("bert", "roberta", "camembert", "xlm-roberta", "electra")
MODEL_TYPES = ("distilbert", *LIKE_BERT, "longformer")
# Tables 5 and 6: the share of tokens kept after each layer. The shares exceed the budgets of the tables.
PROFILES = {
    "table5_30": (0.452, 0.439, 0.425, 0.412, 0.399, 0.385),
    "table5_50": (0.523, 0.513, 0.502, 0.492, 0.481, 0.471),
    "table6_30": (0.50, 0.49, 0.475, 0.46, 0.445, 0.43, 0.415, 0.40, 0.385, 0.37, 0.355, 0.34),
    "table6_50": (0.60, 0.58, 0.56, 0.54, 0.52, 0.50, 0.48, 0.46, 0.44, 0.42, 0.40, 0.38),
}


def _is_stretch(ends: Any) -> bool:
    numbers = isinstance(ends, tuple) and all(isinstance(x, int | float) and math.isfinite(x) for x in ends)
    return numbers and len(ends) == 2 and ends[0] < 0 < 1 < ends[1]


def _are_gates(gates: Any) -> bool:
    if isinstance(gates, str):
        return gates in ("after_blocks", "input", "output")
    whole = isinstance(gates, tuple) and bool(gates) and all(type(gate) is int for gate in gates)
    return whole and gates[0] >= 0 and list(gates) == sorted(set(gates))


def _is_profile(profile: Any) -> bool:
    shares = PROFILES.get(profile, ()) if isinstance(profile, str) else profile
    numbers = isinstance(shares, tuple) and bool(shares) and all(isinstance(x, int | float) for x in shares)
    return numbers and all(0 < b <= a for a, b in itertools.pairwise((1, *shares)))


Budget = Annotated[float, within("(0, 1]")]
Stretch = Annotated[tuple[float, float], Must("(gamma, zeta) with gamma < 0 and zeta > 1", _is_stretch)]
Profile = Annotated[
    str | tuple[float, ...],
    Must(f"one of {', '.join(PROFILES)} or non-increasing shares in (0, 1]", _is_profile),
]
Gates = Annotated[
    str | tuple[int, ...], Must("after_blocks, input, output or increasing positions", _are_gates)
]


@dataclass(frozen=True)
class RetentionConfig:
    """Which tokens of a sequence are kept, where the gates are, and how the gates are trained.

    Attributes:
        budget: rho, the share of an example's tokens that is kept, in (0, 1]; at 1 the model is dense.
        method: ``adaptive`` (the paper), or a baseline on the same encoder: ``random``, ``h2o`` (the tokens
            that receive most attention), ``top`` (Li et al. 2023: gates on ranks by received attention),
            ``infor_coef`` (Tan 2023: an MLP sampler, Gumbel-softmax, a bottleneck), ``dense``.
        gates: ``after_blocks``, ``input`` (before the first block), ``output`` (one gate after the last
            block, which saves no compute), or a tuple of places: 0 is the input, l is after block l.
        schedule: ``constant``: floor(rho T) of the original T tokens from the first gate on (later gates
            have nothing to drop); ``geometric``: each gate keeps floor(rho T_l) of its T_l input tokens;
            ``profile``: the shares of T in ``profile``, one per gate.
        profile: for schedule ``profile``: non-increasing shares, or a name in :data:`PROFILES`.
        summary_decay: gamma of m_t in Eq. 3; the paper prints no value.
        scorer_width: rows of W and U in Eq. 3; the paper prints no value.
        temperature, stretch: beta and (gamma, zeta) of Hard-Concrete, Eq. 6.
        relaxation: ``sigmoid`` is the ablation without variational relaxation: z = p.
        penalty: the quantity that the budget limits: ``paper``: sum of p = sigmoid(s); ``expected_l0``: sum
            of P(z > 0).
        unit: unit of the constraint: ``share`` of an example's tokens, or ``count`` of tokens, as printed.
            Only with shares is the step of the multiplier independent of the length.
        multiplier: ``ascent``: projected ascent after each step; ``joint``: lambda in the optimiser step of
            the weights (the ablation without alternation); ``fixed``: always ``initial_multiplier``.
        multiplier_step: eta of the ascent.
        initial_multiplier: the initial lambda.
        constraint: ``at_most`` as in Eq. 2, lambda >= 0; ``equal``: lambda may be negative, so that gates
            that closed below the budget reopen.
        augmentation: weight c of c/2 (sum p - M)^2 in the penalty (the method of multipliers). The term damps
            the multiplier, which otherwise oscillates. The paper does not use it.
        selection: ``top_m`` (Eq. 7), or ``threshold``: the ablation that keeps p > ``threshold``.
        gate_keys: in training, add log z to the attention scores of a token as a key. A closed token
            therefore receives no attention, as at inference. The paper's text only multiplies H.
        open_steps: number of initial training steps in which all gates are open.
        hard_from_step: training step from which z is the hard selection of inference (top-M), with the
            gradient of the soft z (straight-through); None: never.
        initial_logit: initial b of Eq. 3; a positive value opens the gates.
        dropped: the state of a dropped token that the head reads: ``zero`` (H * z, Eq. 7), or its ``last``
            state.
        protect: tokens that are never dropped and count in M: the first one (``cls``), or all up to the first
            separator (``question``). ``auto`` is ``question`` for question answering, else ``cls``.
        sep_token_id: the separator, if the model's config does not name it.
        over_budget: how to handle an example whose protected tokens alone exceed M: ``error``, or ``keep``
            all of them and exceed the budget.
        removal: at inference, ``gather`` the kept tokens into shorter tensors, or ``mask`` the others (the
            slow reference for ``gather``).
        bottleneck_weight: weight of Infor-Coef's KL divergence from Bernoulli(rho).
        distillation_weight: weight of ToP's KL divergence from the dense teacher.
        ranks: number of ToP's gates, one for each bucket of relative rank.
        seed: seed of method ``random`` at inference; the selection depends only on the example and the seed.

    Raises:
        ValueError: a value is not allowed; the message begins with the setting's name.
    """

    budget: Budget
    method: Literal["adaptive", "random", "h2o", "top", "infor_coef", "dense"] = "adaptive"
    gates: Gates = "after_blocks"
    schedule: Literal["constant", "geometric", "profile"] = "constant"
    profile: Profile | None = None
    summary_decay: Share = 0.9
    scorer_width: Count = 64
    temperature: Positive = 0.66
    stretch: Stretch = (-0.1, 1.1)
    relaxation: Literal["hard_concrete", "sigmoid"] = "hard_concrete"
    penalty: Literal["paper", "expected_l0"] = "paper"
    unit: Literal["share", "count"] = "share"
    multiplier: Literal["ascent", "joint", "fixed"] = "ascent"
    multiplier_step: NotNegative = 1e-2
    initial_multiplier: Finite = 0.0
    constraint: Literal["at_most", "equal"] = "at_most"
    augmentation: NotNegative = 0.0
    selection: Literal["top_m", "threshold"] = "top_m"
    threshold: Annotated[float, within("(0, 1)")] = 0.5
    gate_keys: bool = False
    open_steps: CountFrom0 = 0
    hard_from_step: CountFrom0 | None = None
    initial_logit: Finite = 2.0
    dropped: Literal["zero", "last"] = "zero"
    protect: Literal["auto", "cls", "question"] = "auto"
    sep_token_id: Annotated[int, number("a token's number", lambda x: x >= 0, int)] | None = None
    over_budget: Literal["error", "keep"] = "error"
    removal: Literal["gather", "mask"] = "gather"
    bottleneck_weight: NotNegative = 0.1
    distillation_weight: NotNegative = 1.0
    ranks: Count = 64
    seed: CountFrom0 = 0

    def __post_init__(self):
        for name in ("gates", "stretch", "profile"):  # as lists from JSON or YAML
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check(self)
        if self.constraint == "at_most" and self.initial_multiplier < 0:
            raise ValueError("initial_multiplier: must be at least 0 if constraint is at_most")
        if (self.schedule == "profile") != (self.profile is not None):
            raise ValueError(
                f"profile: goes with schedule: profile, got {self.profile!r} and {self.schedule}"
            )

    @property
    def profile_shares(self) -> tuple[float, ...]:
        """The shares of ``profile``, one per gate."""
        return PROFILES[self.profile] if isinstance(self.profile, str) else self.profile or ()

    @property
    def is_learned(self) -> bool:
        """Whether the gates have trainable weights."""
        return self.method in LEARNED

    @property
    def is_dense(self) -> bool:
        """Whether no token is ever dropped."""
        return self.method == "dense" or (self.budget == 1 and self.schedule != "profile")

    def places(self, num_layers: int) -> tuple[int, ...]:
        """The places of gates in an encoder of ``num_layers`` blocks: 0 is the input, l is after block l.

        Raises:
            ValueError: the encoder has no such place, or the profile does not have one share per gate.
        """
        if self.is_dense:
            return ()
        named = {"after_blocks": tuple(range(1, num_layers + 1)), "input": (0,), "output": (num_layers,)}
        places = named[self.gates] if isinstance(self.gates, str) else self.gates
        if places[-1] > num_layers:
            raise ValueError(f"gates: position {places[-1]} is after the last of {num_layers} blocks")
        if self.schedule == "profile" and len(self.profile_shares) != len(places):
            raise ValueError(
                f"profile: has {len(self.profile_shares)} shares for {len(places)} gates; give one per gate"
            )
        return places

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values, as stored in ``config.json``."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`as_dict`.

        Raises:
            ValueError: a setting is unknown.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in set(values) - set(known):
            raise ValueError(f"{name}: no such setting{did_you_mean(name, known)}")
        return cls(**values)
