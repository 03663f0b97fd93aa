import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_repro.model import FoXConfig, FoXForCausalLM

# Table 2: layers, hidden, heads; and SwiGLU's widths in Pro and LLaMA, hidden * ratio * 2/3 up to 256 * n.
SIZES = {
    "125M": (12, 768, 12, 1792, 2048),
    "360M": (24, 1024, 16, 2560, 2816),
    "760M": (24, 1536, 24, 3584, 4096),
}
VOCAB = 50257
FLAGS = ("qk_norm", "qk_norm_share_param_across_head", "use_k_shift", "use_v_shift", "use_output_gate")
FLAGS += ("use_output_norm", "use_rope")


@pytest.mark.parametrize("name", SIZES)
def test_parameter_counts_match_a_hand_computation(name):
    layers, d, h, pro, llama = SIZES[name]
    shape = {"num_hidden_layers": layers, "hidden_size": d, "num_heads": h}
    attention = 5 * d * d + 3 * h * d + h  # q k v o gate; forget gate, two shifts; bias
    norms = 2 * d + 2 * d + d  # block, QK, output
    config = FoXConfig.pro(**shape)
    assert config.num_parameters() == layers * (attention + norms + 3 * d * pro) + d + VOCAB * d
    # The name is this number, roughly: 123.9, 367.3 and 759.5 million.
    assert abs(config.num_parameters() / 1e6 / int(name[:-1]) - 1) < 0.03
    by_hand = layers * (4 * d * d + h * d + h + 2 * d + 3 * d * llama) + d + VOCAB * d
    assert FoXConfig.llama(**shape).num_parameters() == by_hand


@settings(max_examples=25, deadline=None)
@given(
    flags=st.fixed_dictionaries(dict.fromkeys(FLAGS, st.booleans())),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([16, 40, 64]),
    width=st.none() | st.integers(1, 300),
)
def test_parameter_counts_match_the_model_for_every_combination(flags, heads, head_dim, width):
    shape = {"vocab_size": 11, "hidden_size": heads * head_dim, "num_hidden_layers": 2, "num_heads": heads}
    config = FoXConfig(**shape, intermediate_size=width, log_pruning_tolerance=None, **flags)
    with torch.device("meta"):
        actual = sum(p.numel() for p in FoXForCausalLM(config).parameters())
    assert config.num_parameters(non_embedding=False) == actual


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 100, "num_heads": 3}, "hidden_size: must be divisible by num_heads"),
        ({"hidden_size": 64, "num_heads": 8}, "head dimension, must be from 16 to 256"),
        ({"hidden_size": 512, "num_heads": 1}, "head dimension, must be from 16 to 256"),
        ({"hidden_size": 64.0}, "hidden_size: must be a whole number of at least 1, got 64.0"),
        ({"num_heads": True}, "num_heads: must be a whole number of at least 1, got True"),
        ({"intermediate_size": 0}, "intermediate_size: must be a whole number .* or None, got 0"),
        ({"initializer_range": float("nan")}, "initializer_range: must be a finite number above 0"),
        ({"qk_norm": 1}, "qk_norm: must be true or false, got 1"),
        ({"log_pruning_tolerance": 10.0}, "without one, attention is exact.*, or None, got 10.0"),
        ({"log_pruning_tolerance": "auto"}, "log_pruning_tolerance: must be a finite number"),
        (
            {"use_rope": True, "log_pruning_tolerance": None, "hidden_size": 17, "num_heads": 1},
            "must be even",
        ),
        ({"use_rope": True}, "log_pruning_tolerance: must be None with use_rope, .* got -10.0"),
    ],
)
def test_invalid_values_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        FoXConfig(**arguments)
