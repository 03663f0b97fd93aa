"""The replacement for fla's (flash-linear-attention's) forgetting attention, also inside fla's layers."""

import sys
import types

import pytest
import torch

from acp_repro.attention import fla as ours
from acp_repro.attention.reference import forgetting_attention as reference


def inputs(heads=4, kv_heads=2, length=150):
    torch.manual_seed(0)
    q = torch.randn(2, length, heads, 16, requires_grad=True)
    k, v = (torch.randn(2, length, kv_heads, 16, requires_grad=True) for _ in range(2))
    g = torch.nn.functional.logsigmoid(torch.randn(2, length, heads)).requires_grad_()
    return q, k, v, g


@pytest.mark.parametrize(("window", "bounds"), [(None, None), (8, None), (8, torch.tensor([0, 150]))])
def test_fla_call_matches_the_equations_with_grouped_heads_and_a_window(window, bounds):
    """Row i sees keys i - window_size + 1 to i, as in the mask of fla's naive_forgetting_attn."""
    given = [x[: 2 if bounds is None else 1] for x in inputs()]
    rows = torch.arange(150)
    seen = torch.ones(150, 150, dtype=torch.bool).tril() & (rows > rows[:, None] - (window or 150))
    right, _ = reference(*(x.double().transpose(1, 2) for x in given), sm_scale=0.25, kept=seen)
    out = ours.parallel_forgetting_attn(*given, None, window, bounds)
    torch.testing.assert_close(out.transpose(1, 2).double(), right, atol=1e-5, rtol=1e-5)


def test_fla_layers_call_this_package_between_use_and_restore(monkeypatch):
    """With a mock of fla, which does not have to be installed."""
    own = object()
    names = ("fla", "fla.layers", "fla.layers.forgetting_attn", "fla.ops", "fla.ops.forgetting_attn")
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        module.parallel_forgetting_attn = own
        monkeypatch.setitem(sys.modules, name, module)
    layer = sys.modules["fla.layers.forgetting_attn"]
    ours.use(adaptive_threshold=-1.0)
    q, k, v, g = inputs()
    pruned = ours.parallel_forgetting_attn(q, k, v, g, adaptive_threshold=-1.0)
    assert (layer.parallel_forgetting_attn(q, k, v, g, cu_seqlens=None) == pruned).all()
    assert not (pruned == ours.parallel_forgetting_attn(q, k, v, g)).all()
    ours.restore()
    assert layer.parallel_forgetting_attn is own


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_both_kernels_match_the_equations_on_a_gpu(packed):
    """Outputs and all gradients in bfloat16 against float64; our errors are at most those of fla."""
    fla = pytest.importorskip("fla.ops.forgetting_attn", reason="pip install flash-linear-attention")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 700, heads, 64, device="cuda").bfloat16() for heads in (6, 2, 2))
    g = torch.nn.functional.logsigmoid(torch.randn(1, 700, 6, device="cuda") + 2)
    upstream = torch.randn_like(q)
    bounds = torch.tensor([0, 300, 700], dtype=torch.int32, device="cuda") if packed else None

    def run(call, dtype=None):
        given = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (q, k, v, g)]
        out = call(*given)
        return [out, *torch.autograd.grad(out, given, upstream.to(out.dtype))]

    def equations(q, k, v, g):
        parts = [slice(0, 300), slice(300, 700)] if packed else [slice(None)]
        heads_first = [
            x.transpose(1, 2) for x in (q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2), g)
        ]
        outs = [reference(*(x[:, :, part] for x in heads_first), sm_scale=64**-0.5)[0] for part in parts]
        return torch.cat(outs, 2).transpose(1, 2)

    right = run(equations, torch.float64)
    errors = {}
    for name, call in (("ours", ours.parallel_forgetting_attn), ("theirs", fla.parallel_forgetting_attn)):
        found = run(lambda *x, call=call: call(*x, cu_seqlens=bounds))
        errors[name] = [
            ((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)
        ]
    assert all(a < max(1.5 * b, 5e-3) for a, b in zip(errors["ours"], errors["theirs"], strict=True)), errors
    assert max(errors["theirs"]) < 0.05, errors  # the same function
