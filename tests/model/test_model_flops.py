"""FLOPs by hand and the table of GPUs."""

import pytest
import torch

from acp_repro.attention.boundary import attention_flops
from acp_repro.model import FoXConfig
from acp_repro.model.config import peak_flops


def test_flops_by_hand():
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
    with pytest.raises(ValueError, match=r"kept_ratio: must be a number in \[0, 1\]"):
        config.flops_per_token(length, 1.1)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("h100", 989),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_peak_flops(name, tera):
    expected = None if tera is None else tera * 1e12
    assert peak_flops(name) == peak_flops(name, torch.bfloat16) == expected
    assert peak_flops(name, torch.float32) is None
