"""The table of backends: a new backend is one entry, and an unknown name raises an error that lists them."""

from __future__ import annotations

import torch

from acp_repro.attention import (
    PagedKVCache,
    choose_implementation,
    forgetting_attention,
    forgetting_attention_with_kvcache,
    pruning_grid,
)
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


def step():
    """The arguments of a decoding step: 70 tokens of 2 heads."""
    k = torch.randn(4, 64, 16)
    c = -torch.rand(4, 64).cumsum(1).double()[:, None] / 64
    table = torch.arange(4, dtype=torch.int32).view(1, 2, 2)
    cache = PagedKVCache(k, k + 1, c, table, torch.tensor([70], dtype=torch.int32))
    return torch.randn(1, 2, 1, 16), cache, torch.zeros(1, 2, dtype=torch.int32)


def given(length=100):
    q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
    return [x.requires_grad_() for x in (q, k, v, -torch.rand(1, 2, length))]


def test_a_backend_is_one_entry(monkeypatch):
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
    compiled = torch.compile(
        lambda *x: forgetting_attention(*x, head_first=True, implementation="mine"), backend="eager"
    )
    torch.testing.assert_close(compiled(*tensors), results["reference"][0], rtol=1e-4, atol=1e-4)
    arguments = step()
    found = [
        forgetting_attention_with_kvcache(*arguments, head_first=True, implementation=name)
        for name in ("mine", "reference")
    ]
    torch.testing.assert_close(*found)
