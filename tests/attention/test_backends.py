"""The table of backends: a new backend is one entry, and an unknown name raises an error that lists them."""

from __future__ import annotations

import torch

from acp_repro.attention import choose_implementation, forgetting_attention, pruning_grid
from acp_repro.attention.backends import BACKENDS, Blockwise


class Mine(Blockwise):
    """A backend with a different grid that supports only the meta device."""

    def supports(self, device):
        return device.type == "meta"

    def check(self, device):
        if device.type not in ("cpu", "meta"):
            raise ValueError(f"implementation='mine' runs on no {device}")

    def block_sizes(self, head_dim, dtype):
        return 32, 32


def given(length=100):
    q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
    return [x.requires_grad_() for x in (q, k, v, -torch.rand(1, 2, length))]


def test_backend_is_one_table_entry(monkeypatch):
    monkeypatch.setitem(BACKENDS, "mine", Mine())
    assert choose_implementation(torch.device("meta")) == "mine"
    assert choose_implementation(torch.device("cpu")) == "blockwise"
    assert pruning_grid("mine", 16, torch.float32) == (32, 32)
    tensors, results = given(), {}
    for name in ("mine", "reference"):
        options = {"head_first": True, "implementation": name}
        out, start = forgetting_attention(
            *tensors, adaptive_threshold=-1e4, return_start_index=True, **options
        )
        results[name] = out, *torch.autograd.grad(out.square().sum(), tensors)
        assert start.shape == (1, 2, 4 if name == "mine" else 2)
    for a, b in zip(*results.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
