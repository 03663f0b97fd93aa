"""The table of backends: a new backend is one entry, and an unknown name raises an error that lists them."""

import torch

from acp_repro.attention import choose_implementation, pruning_grid
from acp_repro.attention.backends import BACKENDS, Blockwise, find_backend

from .budgets import NAMES, make_inputs, run


class Mine(Blockwise):
    """A backend with a different grid that supports only the meta device."""

    def supports(self, device):
        return device.type == "meta"

    def check(self, device):
        if device.type not in ("cpu", "meta"):
            raise ValueError(f"implementation='mine' runs on no {device}")

    def block_sizes(self, head_dim, dtype):
        return 32, 32


def test_backend_is_one_table_entry(monkeypatch):
    monkeypatch.setitem(BACKENDS, "mine", Mine())
    assert choose_implementation(torch.device("meta")) == "mine"
    assert choose_implementation(torch.device("cpu")) == "blockwise"
    assert pruning_grid("mine", 16, torch.float32) == (32, 32)
    inputs = make_inputs(100, 100, 2, 2, device="cpu")
    found, start = run(inputs, "mine", adaptive_threshold=-1e4)
    expected, _ = run(inputs, "reference", adaptive_threshold=-1e4)
    assert start.shape == (1, 2, 4)
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)


def test_compiled_code_reads_the_block_sizes_of_several_head_dims():
    compiled = torch.compile(
        lambda x: x + find_backend("triton").block_sizes(x.shape[-1], x.dtype)[0],
        backend="eager",
        fullgraph=True,
    )
    assert all(compiled(torch.zeros(2, head_dim)).eq(64).all() for head_dim in (32, 64))
