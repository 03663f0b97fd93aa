from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_repro.attention import forgetting_attention
from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.model.config import HEAD_DIM_RANGE

# Table 2, with the SwiGLU widths worked out by hand: hidden * ratio * 2/3 up to a multiple of 256.
SIZES = {
    # name: layers, hidden, heads, width of Pro, width of LLaMA
    "125M": (12, 768, 12, 1792, 2048),
    "360M": (24, 1024, 16, 2560, 2816),
    "760M": (24, 1536, 24, 3584, 4096),
}
VOCAB = 50257


def size(name: str) -> dict[str, int]:
    layers, hidden, heads, _, _ = SIZES[name]
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_heads": heads}


def actual_parameters(config: FoXConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in FoXForCausalLM(config).parameters())


@pytest.mark.parametrize("name", SIZES)
def test_pro_counts_by_hand(name):
    layers, d, h, width, _ = SIZES[name]
    config = FoXConfig.pro(**size(name))
    attention = 5 * d * d + 3 * h * d + h  # q k v o gate; forget gate, two shifts; bias
    norms = 2 * d + 2 * d + d  # block, QK, output
    by_hand = layers * (attention + norms + 3 * d * width) + d + VOCAB * d
    assert config.num_parameters() == by_hand
    assert config.num_parameters(non_embedding=False) == by_hand + VOCAB * d
    assert config.num_parameters(non_embedding=False) == actual_parameters(config)
    # The name is this number, roughly: 123.9, 367.3 and 759.5 million.
    assert abs(config.num_parameters() / 1e6 / int(name[:-1]) - 1) < 0.03


@pytest.mark.parametrize("name", SIZES)
def test_llama_counts_by_hand(name):
    layers, d, h, _, width = SIZES[name]
    config = FoXConfig.llama(**size(name))
    by_hand = layers * (4 * d * d + h * d + h + 2 * d + 3 * d * width) + d + VOCAB * d
    assert config.num_parameters() == by_hand
    assert config.num_parameters(non_embedding=False) == actual_parameters(config)


@settings(max_examples=25, deadline=None)
@given(
    flags=st.fixed_dictionaries(
        {
            name: st.booleans()
            for name in (
                "qk_norm",
                "qk_norm_share_param_across_head",
                "use_k_shift",
                "use_v_shift",
                "use_output_gate",
                "use_output_norm",
            )
        }
    ),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([16, 40, 64]),
    width=st.none() | st.integers(1, 300),
)
def test_counts_are_those_of_the_model_for_every_combination(flags, heads, head_dim, width):
    config = FoXConfig(
        vocab_size=11,
        hidden_size=heads * head_dim,
        num_hidden_layers=2,
        num_heads=heads,
        intermediate_size=width,
        **flags,
    )
    assert config.num_parameters(non_embedding=False) == actual_parameters(config)


def test_flops_by_hand():
    config = FoXConfig.pro(**size("125M"))
    d, length = 768, 4096
    matrices = 12 * (5 * d * d + 3 * 12 * d + 3 * d * 1792) + VOCAB * d
    # A causal row i has i keys; q.k and weight*v are two products of d multiply-adds.
    attention = 12 * 2 * 2 * d * sum(range(1, length + 1)) / length
    assert config.flops_per_token(length) == 3 * (2 * matrices + attention)
    assert config.flops_per_token(length, 0.3) == pytest.approx(
        3 * (2 * matrices + 0.3 * attention), rel=1e-12
    )
    assert config.flops_per_token(length, 0) == 6 * matrices
    assert config.flops_per_token(length, backward=False) * 3 == config.flops_per_token(length)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), "1"])
def test_flops_refuses_an_impossible_ratio(ratio):
    with pytest.raises(ValueError, match=r"kept_ratio: must be a number in \[0, 1\]"):
        FoXConfig().flops_per_token(128, ratio)


def test_flops_refuses_an_impossible_length():
    with pytest.raises(ValueError, match="context_length: must be a whole number of at least 1"):
        FoXConfig().flops_per_token(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 100, "num_heads": 3}, "hidden_size: must be divisible by num_heads"),
        ({"hidden_size": 64, "num_heads": 8}, "head dimension, must be from 16 to 256"),
        ({"hidden_size": 512, "num_heads": 1}, "head dimension, must be from 16 to 256"),
        ({"hidden_size": 64.0}, "hidden_size: must be a whole number of at least 1, got 64.0"),
        ({"vocab_size": 0}, "vocab_size: must be a whole number of at least 1, got 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: must be a whole number"),
        ({"num_heads": True}, "num_heads: must be a whole number of at least 1, got True"),
        ({"num_heads": "4"}, "num_heads: must be a whole number of at least 1, got '4'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: must be a whole number"),
        ({"intermediate_size": 0}, "intermediate_size: must be a whole number .* or None, got 0"),
        ({"hidden_ratio": 0}, "hidden_ratio: must be a finite number above 0, got 0"),
        ({"hidden_ratio": None}, "hidden_ratio: must be a finite number above 0, got None"),
        ({"norm_eps": -1e-6}, "norm_eps: must be a finite number above 0"),
        ({"initializer_range": float("nan")}, "initializer_range: must be a finite number above 0"),
        ({"qk_norm": 1}, "qk_norm: must be true or false, got 1"),
        ({"use_k_shift": "yes"}, "use_k_shift: must be true or false, got 'yes'"),
        ({"use_v_shift": None}, "use_v_shift: must be true or false"),
        ({"use_output_gate": 0}, "use_output_gate: must be true or false"),
        ({"use_output_norm": 0}, "use_output_norm: must be true or false"),
        ({"qk_norm_share_param_across_head": 0}, "qk_norm_share_param_across_head: must be true or false"),
        ({"log_pruning_tolerance": 0}, "log_pruning_tolerance: must be a finite number below 0"),
        ({"log_pruning_tolerance": 10.0}, "without one, attention is exact.*, or None, got 10.0"),
        ({"log_pruning_tolerance": float("-inf")}, "log_pruning_tolerance: must be a finite"),
        ({"log_pruning_tolerance": "auto"}, "log_pruning_tolerance: must be a finite number"),
        ({"log_pruning_tolerance": False}, "log_pruning_tolerance: must be a finite number"),
    ],
)
def test_wrong_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        FoXConfig(**arguments)


def test_head_dims_are_those_of_the_attention():
    def attend(head_dim: int) -> None:
        x = torch.zeros(1, 1, 1, head_dim)
        forgetting_attention(x, x, x, torch.zeros(1, 1, 1))

    low, high = HEAD_DIM_RANGE
    for accepted in (low, high):
        attend(accepted)
        FoXConfig(hidden_size=accepted, num_heads=1)
    for refused in (low - 1, high + 1):
        with pytest.raises(ValueError, match="head_dim"):
            attend(refused)
        with pytest.raises(ValueError, match="head dimension"):
            FoXConfig(hidden_size=refused, num_heads=1)


def test_presets_yield_to_arguments_and_are_frozen():
    config = FoXConfig.llama(use_output_gate=True)
    assert config.use_output_gate and not config.qk_norm and config.hidden_ratio == 4
    assert FoXConfig.pro() == FoXConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1
    # A width that was computed follows the width it was computed from.
    assert dataclasses.replace(FoXConfig(), hidden_size=1536, num_heads=24).mlp_width == 3584


def test_package_lists_what_it_exports():
    import acp_repro.model as package

    for name in package.__all__:
        assert getattr(package, name).__name__ == name
        assert name in dir(package)
    with pytest.raises(AttributeError, match="no attribute 'FoXModle'"):
        _ = package.FoXModle
