import math

import pytest
import torch
import torch.nn.functional as F
from model_helpers import relative_error, with_strong_gates

from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.model.layers import ForgettingAttentionLayer, make_rotation
from acp_repro.model.norms import HeadRMSNorm, RMSNorm
from acp_repro.model.swiglu import SwiGLU


def test_compiled_swiglu_does_not_store_the_product():
    layer, x = SwiGLU(16, 40, std=0.2), torch.randn(3, 8, 16)
    expected = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    shapes = []

    def keep(x):
        shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)(x)
    found = torch.autograd.grad(out.square().sum(), layer.parameters())
    assert (24, 80) in shapes and (24, 40) not in shapes
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("share", [False, True])
def test_head_norm_is_per_head_with_shared_or_separate_weights(share):
    heads, dim = 3, 20
    norm = HeadRMSNorm(heads, dim, eps=1e-5, share_across_heads=share)
    assert norm.weight.shape == ((dim,) if share else (heads * dim,))
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 5, heads, dim)
    x[0] *= 1e-3  # eps determines the norm of a row near zero
    weight = norm.weight.repeat(heads) if share else norm.weight
    gate = torch.randn(2, 5, heads, dim)
    for h in range(heads):
        one = RMSNorm(dim, eps=1e-5)
        one.weight.data.copy_(weight[h * dim : (h + 1) * dim])
        torch.testing.assert_close(norm(x)[:, :, h], one(x[:, :, h]))
        gated = one(x[:, :, h]) * torch.sigmoid(gate[:, :, h])
        torch.testing.assert_close(norm(x, gate)[:, :, h], gated)
    x, gate = x.bfloat16(), gate.bfloat16()  # with its gate, rounded once
    assert torch.equal(norm(x, gate), norm(x.float(), gate.float()).bfloat16())
    assert torch.equal(one(x), one(x.float()).bfloat16())


def reference_layer(layer: ForgettingAttentionLayer, x: torch.Tensor) -> torch.Tensor:
    """The dense Pro layer in float64, step by step (Section 2)."""
    weights = {name: p.detach().double() for name, p in layer.named_parameters()}
    batch, time, hidden = x.shape
    heads, dim = layer.num_heads, layer.head_dim
    x = x.double()

    def split(y):
        return y.view(batch, time, heads, dim)

    def shifted(name):
        z = split(x @ weights[f"{name}.linear.weight"].T)
        a = torch.sigmoid(x @ weights[f"{name}.shift_proj.weight"].T)[..., None]
        before = torch.cat((torch.zeros_like(z[:, :1]), z[:, :-1]), 1)
        return a * before + (1 - a) * z

    def norm(y, name, eps):
        y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
        return y * weights[f"{name}.weight"].view(-1, dim)

    q = norm(split(x @ weights["q_proj.weight"].T), "q_norm", 1e-5)
    k = norm(shifted("k_proj"), "k_norm", 1e-5)
    v = shifted("v_proj")
    if layer.fgate_proj is None:  # RoPE: each pair is a complex number, turned by its position
        turn = torch.arange(time)[:, None, None] * 500_000.0 ** (-torch.arange(dim // 2) / (dim // 2))
        turn = torch.polar(torch.ones_like(turn), turn)
        q, k = (torch.complex(y[..., : dim // 2], y[..., dim // 2 :]) * turn for y in (q, k))
        scores = torch.einsum("bihd,bjhd->bhij", q, k.conj()).real / math.sqrt(dim)
    else:
        gate = F.logsigmoid(x @ weights["fgate_proj.weight"].T + weights["fgate_proj.bias"])
        c = gate.cumsum(1).transpose(1, 2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(dim)
        scores = scores + c[..., :, None] - c[..., None, :]
    mask = torch.ones(time, time, dtype=torch.bool).triu(1)
    attention = scores.masked_fill(mask, -math.inf).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", attention, v)
    if layer.output_norm is not None:
        out = norm(out, "output_norm", 1e-6)
    out = out.flatten(2) * torch.sigmoid(x @ weights["ogate_proj.weight"].T)
    return out @ weights["o_proj.weight"].T


@pytest.mark.parametrize(
    ("share", "use_rope", "output_norm"),
    [(False, False, True), (True, False, True), (False, True, True), (False, False, False)],
)
@pytest.mark.parametrize("time", [1, 63, 129])
def test_attention_layer_matches_the_equations(share, time, use_rope, output_norm):
    torch.manual_seed(time)
    config = FoXConfig.pro(
        use_rope=use_rope,
        use_output_norm=output_norm,
        vocab_size=7,
        hidden_size=64,
        num_hidden_layers=1,
        num_heads=2,
        qk_norm_share_param_across_head=share,
        log_pruning_tolerance=None,
    )
    layer = with_strong_gates(FoXForCausalLM(config)).model.layers[0].attn
    x = torch.randn(2, time, 64)
    x[:, ::2] *= 0.01  # queries and keys whose norms the epsilon of the QK-norm changes
    expected = reference_layer(layer, x)
    # float32 roundings grow as the square root of some hundred operations along the way.
    found = layer(x, rotation=make_rotation(torch.arange(time), 32) if use_rope else None)
    assert relative_error(found, expected) < 16 * 2.0**-24 * math.sqrt(64)


def test_rotations_at_large_positions_match_float64():
    """A float32 angle near position 2,000,000 has an error of up to 0.06."""
    end = 2_000_000
    cos, sin = make_rotation(torch.arange(-3, 0) + end, 32)
    for row, position in enumerate(range(end - 3, end)):
        angles = [position * 500_000.0 ** (-n / 16) for n in range(16)]
        assert cos[row].flatten().tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-7)
        assert sin[row, 0, 1].tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-7)


def record_core(layer: ForgettingAttentionLayer) -> list:
    calls = []
    layer.core.register_forward_hook(lambda module, args, out: calls.append((args[:5], out)))
    return calls


@pytest.mark.parametrize("share", [False, True])
def test_threshold_with_qk_norm_follows_from_its_weights(share):
    config = FoXConfig.pro(
        vocab_size=7, hidden_size=64, num_hidden_layers=1, num_heads=4, qk_norm_share_param_across_head=share
    )
    layer = ForgettingAttentionLayer(config)
    torch.nn.init.normal_(layer.q_norm.weight)
    torch.nn.init.normal_(layer.k_norm.weight)
    calls = record_core(layer)
    layer(torch.randn(1, 77, 64))
    ((args, _),) = calls
    gammas = [norm.weight.view(-1, 16).abs().amax(-1).expand(4) for norm in (layer.q_norm, layer.k_norm)]
    plain = -2 * gammas[0] * gammas[1] * math.sqrt(16) - math.log(77) - 10.0
    threshold = args[-1].expand(1, 4)[0]
    # At most the plain value of Appendix E, and lower only by what covers float32 rounding.
    assert (threshold <= plain).all() and (threshold >= plain * (1 + 1e-4)).all()


def test_exact_attention_can_be_selected(small_model, small_ids):
    calls = record_core(small_model.model.layers[0].attn)
    pruned = small_model(small_ids)
    small_model.set_log_pruning_tolerance(None)
    exact = small_model(small_ids)
    assert calls[0][0][-1] is not None and calls[1][0][-1] is None
    assert small_model.config.log_pruning_tolerance is None
    assert relative_error(pruned, exact) < math.exp(-10)
    with pytest.raises(ValueError, match="log_pruning_tolerance"):
        small_model.set_log_pruning_tolerance(1.0)
    assert small_model.model.layers[0].attn.log_pruning_tolerance is None


def test_gates_are_float32_under_autocast(small_model, small_ids):
    calls = record_core(small_model.model.layers[1].attn)
    with torch.autocast("cpu", torch.bfloat16):
        small_model(small_ids)
    (q, k, v, log_fgate, _), out = calls[0]
    assert q.dtype == k.dtype == v.dtype == out.dtype == torch.bfloat16
    assert log_fgate.dtype == torch.float32
