"""FLOPs by hand and the table of GPUs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from acp_repro.attention import forgetting_attention, register_flop_formulas
from acp_repro.attention.boundary import attention_flops
from acp_repro.attention.reference import kept_entries
from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.model.config import peak_flops


def test_flops_match_a_hand_computation():
    config = FoXConfig.llama(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_heads=2)
    length = 64
    # q, k, v, o; the forget gate; gate, up and down of a SwiGLU 256 wide
    block = 4 * 32 * 32 + 32 * 2 + 3 * 32 * 256
    matrices = 2 * (2 * block + 100 * 32)
    # One formula with the kernels' count: blocks of one entry on and under the diagonal.
    pairs = length * (length + 1) // 2
    attention = 2 * 2 * attention_flops(pairs, 1, 1, 16, backward=False) / length
    assert config.flops_per_token(length) == 3 * (matrices + attention)
    assert config.flops_per_token(length, 0.25) == 3 * (matrices + attention / 4)
    assert config.flops_per_token(length, backward=False) * 3 == config.flops_per_token(length)
    with pytest.raises(ValueError, match=r"keep_ratio: must be a number in \[0, 1\]"):
        config.flops_per_token(length, 1.1)
    with pytest.raises(ValueError, match=r"keep_ratio: must be a number in \[0, 1\]"):
        config.flops_per_token(length, -0.1)


def test_flops_match_the_counter_of_pytorch():
    """Exact attention equals `flops_per_token`; with pruning, only kept scores count."""
    register_flop_formulas()
    shape = {"vocab_size": 97, "hidden_size": 32, "num_heads": 2, "log_pruning_tolerance": None}
    ids = torch.zeros(2, 150, dtype=torch.long)
    for config in (FoXConfig.pro(**shape), FoXConfig.llama(**shape), FoXConfig.rope(**shape)):
        with FlopCounterMode(display=False) as counter:
            FoXForCausalLM(config)(ids)
        assert counter.get_total_flops() == 300 * config.flops_per_token(150, backward=False)

    q, k, v = torch.randn(3, 1, 300, 2, 16).requires_grad_()
    gates = -torch.tensor([0.1, 1e-4]).expand(1, 300, 2)  # one head is pruned
    options = {"adaptive_threshold": -10.0, "return_start_index": True}
    with FlopCounterMode(display=False) as counter:
        out, boundary = forgetting_attention(q[:, 70:], k, v, gates, **options)
        out.sum().backward()
    diagonal = torch.ones(230, 300, dtype=torch.bool).tril(70)
    pairs = int((kept_entries(boundary, 230, 300, 64, 64) & diagonal).sum())
    assert pairs < 2 * diagonal.sum()
    assert counter.get_total_flops() == sum(attention_flops(pairs, 1, 1, 16, back) for back in (False, True))


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("h100", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_peak_flops(name, tera):
    expected = None if tera is None else tera * 1e12
    assert peak_flops(name) == peak_flops(name, torch.bfloat16) == expected
    assert peak_flops(name, torch.float32) is None
