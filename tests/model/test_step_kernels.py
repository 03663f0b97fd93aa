"""The fused inference kernels against the modules that they replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_helpers import SMALL, relative_error, with_strong_gates

from acp_repro.attention import logit_bound_from_qk_norm, pruning_threshold
from acp_repro.attention.decay import threshold_offset
from acp_repro.model import FoXCache, FoXConfig, FoXForCausalLM, layers
from acp_repro.model.layer_cache import LayerCache
from acp_repro.model.layers import QK_NORM_EPS, token_shift
from acp_repro.model.norms import HeadRMSNorm, RMSNorm

kernels = pytest.importorskip("acp_repro.model.step_kernels", reason="pip install triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALLS = 3 if DEVICE == "cuda" else 1  # on a GPU, the third call repeats the launch of the second
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize(
    ("heads", "head_dim", "share", "dtype"),
    [(3, 16, True, torch.float32), (2, 20, False, torch.bfloat16), (4, 64, False, torch.float32)],
)
@pytest.mark.parametrize(("tokens", "held"), [(1, True), (1, False), (5, True), (17, False)])
@torch.no_grad()
def test_kernels_match_the_modules(heads, head_dim, tokens, held, share, dtype):
    hidden = heads * head_dim
    q, z_k, z_v, gate, x = (torch.randn(2, tokens, hidden, device=DEVICE, dtype=dtype) for _ in range(5))
    *mix, forget = torch.randn(2, tokens, 3 * heads + 3, device=DEVICE, dtype=dtype).split(heads, -1)[:3]
    states = [torch.randn(2, 1, heads, head_dim, device=DEVICE, dtype=dtype) for _ in "kv"]
    states = [state.clone() if held else None for state in states]
    first = [None if state is None else state.clone() for state in states]
    ends = [torch.empty(2, 1, heads, head_dim, device=DEVICE, dtype=dtype) for _ in "kv"]
    norms = [HeadRMSNorm(heads, head_dim, QK_NORM_EPS, share).to(DEVICE, dtype) for _ in "qk"]
    output_norm = HeadRMSNorm(heads, head_dim, 1e-6).to(DEVICE, dtype)
    for norm in (*norms, output_norm):
        torch.nn.init.normal_(norm.weight)

    def split(y):
        return y.unflatten(-1, (heads, head_dim))

    k, v = (token_shift(split(z), m, s) for z, m, s in zip((z_k, z_v), mix, first, strict=True))
    right = [y.transpose(1, 2) for y in (norms[0](split(q)), norms[1](k), v)]
    *found, log_fgate = kernels.shift_and_norm(
        q, z_k, z_v, *mix, forget, *states, *ends, *(norm.weight for norm in norms), heads, QK_NORM_EPS
    )
    for end, z in zip(ends, (z_k, z_v), strict=True):
        assert torch.equal(end, split(z)[:, -1:])
    assert relative_error(log_fgate, F.logsigmoid(forget.float()).transpose(1, 2)) < 1e-6
    # A float32 difference in the last bit may change the rounded bfloat16; the interpreter truncates
    # where a GPU rounds, twice for keys: less than 2^-7 each time.
    budget = 1e-6
    if dtype == torch.bfloat16:
        budget = 2.0**-10 if DEVICE == "cuda" else 2 * 2.0**-7
    for a, b in zip(found, right, strict=True):
        assert a.dtype == dtype and a.shape == b.shape and relative_error(a, b) < budget
    if held:  # one token becomes the state
        for state, z, before in zip(states, (z_k, z_v), first, strict=True):
            assert torch.equal(state, split(z) if tokens == 1 else before)
    gated = kernels.norm_and_gate(split(x).transpose(1, 2), gate, output_norm.weight, 1e-6)
    assert relative_error(gated, output_norm(split(x), split(gate)).flatten(2)) < budget


@pytest.mark.parametrize(
    ("x_dtype", "dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 768), (7, 40)])
@torch.no_grad()
def test_norm_with_the_addition_before_it_matches_its_module(x_dtype, dtype, rows, hidden):
    """The third pair is autocast's: a float32 residual stream and a bfloat16 product."""
    norm = RMSNorm(hidden, 1e-6).to(DEVICE, x_dtype)
    torch.nn.init.normal_(norm.weight)
    for _ in range(CALLS):
        x = 3 * torch.randn(2, rows, hidden, device=DEVICE, dtype=x_dtype)
        change = torch.randn(2, hidden, rows, device=DEVICE, dtype=dtype).mT
        total, out = kernels.add_and_norm(x, change, norm.weight, norm.eps)
    budget = 1e-6
    if x_dtype == torch.bfloat16:
        budget = 2.0**-10 if DEVICE == "cuda" else 2 * 2.0**-7
    assert total.dtype == out.dtype == x_dtype
    assert relative_error(total, x + change) < (budget if DEVICE == "cpu" else 1e-12)
    assert relative_error(out, norm(total)) < budget


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "hidden"), [((1, 1), 48), ((4, 1), 1100), ((1, 3), 64)])
@torch.no_grad()
def test_joint_products_of_few_rows_match_their_projections(shape, hidden, dtype):
    x = torch.randn(*shape, hidden, device=DEVICE).to(dtype)
    sizes = ((70, False), (3, True), (12, False))
    projections = [torch.nn.Linear(hidden, out, bias, DEVICE, dtype) for out, bias in sizes]
    found = kernels.multiply_rows(x, [p.weight for p in projections], [p.bias for p in projections])
    budget = 2e-6 if dtype == torch.float32 else 2.0**-8 if DEVICE == "cuda" else 2.0**-7
    for y, projection in zip(found, projections, strict=True):
        right = F.linear(*(t.double() for t in (x, projection.weight)))
        right = right if projection.bias is None else right + projection.bias.double()
        assert y.dtype == dtype and y.shape == right.shape and relative_error(y, right) < budget


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [False, True])
@torch.no_grad()
def test_threshold_kernel_returns_the_bits_of_the_formula(own, dtype):
    heads, head_dim = 6, 40
    for _ in range(CALLS):
        weights = [torch.randn(heads * head_dim if own else head_dim, device=DEVICE).to(dtype) for _ in "qk"]
        weights[0][:head_dim] = 0.0  # the bound of a head may not be 0
        bound = logit_bound_from_qk_norm(*weights, heads, head_dim, dtype=dtype)
        found = kernels.bound_and_threshold(*weights, heads, head_dim, threshold_offset(777, -10.0), dtype)
        assert torch.equal(found[0], bound)
        assert torch.equal(found[1], pruning_threshold(bound, 777, -10.0))


@torch.no_grad()
def test_log_gates_near_zero_keep_their_digits():
    """Summed over a document, gates of 1 - 1e-7 decide what a global head prunes."""
    heads, forget = 16, torch.linspace(-100, 100, 16 * 16, device=DEVICE).view(1, 16, 16)
    rows, weights = torch.zeros(1, 16, heads * 16, device=DEVICE), [torch.ones(16, device=DEVICE)] * 2
    *_, found = kernels.shift_and_norm(*[rows] * 3, *[forget] * 3, *[None] * 4, *weights, heads, 1e-5)
    right = F.logsigmoid(forget.double()).transpose(1, 2)
    kept = right < -1e-30  # a GPU flushes smaller numbers to zero
    assert ((found - right) / right)[kept].abs().max() < 1e-5 and (found[~kept].abs() < 1e-30).all()


@torch.no_grad()
def test_kernels_accept_inputs_of_any_strides():
    heads, head_dim, tokens = 2, 16, 5
    hidden = heads * head_dim

    def strided(*shape):
        """Random numbers of a shape, whose rows are not contiguous, and the same in contiguous memory."""
        x = torch.randn(*shape[:-2], shape[-1], shape[-2], device=DEVICE).mT
        return x, x.contiguous()

    (q, *z), q_and_z = zip(*(strided(2, tokens, hidden) for _ in range(3)), strict=True)
    mix, mix_apart = strided(2, tokens, heads), strided(2, tokens, heads)
    forget, forget_packed = strided(2, tokens, heads)
    x, x_packed = strided(2, heads, tokens, head_dim)
    gate, gate_packed = strided(2, tokens, hidden)
    weights = [torch.randn(head_dim, device=DEVICE) for _ in "qk"]

    def results(q, z, mix, forget, x, gate):
        found = kernels.shift_and_norm(q, *z, *mix, forget, *[None] * 4, *weights, heads, 1e-3)
        return *found, kernels.norm_and_gate(x, gate, weights[0].repeat(heads), 1e-3)

    packed = [mix[1], mix_apart[1]]
    expected = results(q_and_z[0], q_and_z[1:], packed, forget_packed, x_packed, gate_packed)
    for mixes in ([mix[0], mix_apart[0]], [mix[0], mix_apart[1]], [mix[1], mix_apart[0]]):
        for found, right in zip(results(q, z, mixes, forget, x, gate), expected, strict=True):
            assert torch.equal(found, right)
    gate_up = torch.randn(6, 48, device=DEVICE)[::2]
    assert torch.equal(kernels.silu_and_multiply(gate_up), kernels.silu_and_multiply(gate_up.clone()))


@pytest.mark.parametrize(("width", "dtype"), [(24, torch.float32), (1500, torch.bfloat16)])
def test_swiglu_kernel_matches_its_module(width, dtype):
    gate, up = torch.randn(2, 3, 2 * width, device=DEVICE, dtype=dtype).chunk(2, -1)
    found = kernels.silu_and_multiply(torch.cat((gate, up), -1))
    budget = 1e-6
    if dtype == torch.bfloat16:
        budget = 2.0**-10 if DEVICE == "cuda" else 2 * 2.0**-7
    assert relative_error(found, torch.nn.functional.silu(gate) * up) < budget


def patch_fuses(monkeypatch):
    """Enables the kernels after the padding, on a CPU too."""
    fuses = property(lambda self: self.parent.length >= self.parent.latest_start)
    monkeypatch.setattr(LayerCache, "fuses", fuses)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"use_output_gate": False}, {"use_rope": True}])
def test_decoding_from_the_first_token_equals_the_full_forward(fields, monkeypatch):
    """A step writes the token shift's state, which is initially absent; optional modules may be missing."""
    config = FoXConfig.pro(**{**SMALL, "log_pruning_tolerance": None, **fields})
    model = with_strong_gates(FoXForCausalLM(config)).to(DEVICE)
    patch_fuses(monkeypatch)
    ids, cache = torch.randint(0, SMALL["vocab_size"], (2, 5), device=DEVICE), FoXCache(2, max_length=5)
    found = torch.cat([model(ids[:, t : t + 1], cache=cache) for t in range(5)], 1)
    assert relative_error(found, model(ids)) < 2e-5


@torch.no_grad()
def test_model_with_the_kernels_returns_the_same_logits(monkeypatch):
    config = FoXConfig.pro(**{**SMALL, "log_pruning_tolerance": -30.0})
    model = with_strong_gates(FoXForCausalLM(config)).to(DEVICE)
    ids = torch.randint(0, SMALL["vocab_size"], (2, 84), device=DEVICE)
    seq_start = torch.tensor([0, 30], device=DEVICE)
    # Without a GPU, the kernels and the attention run in the interpreter.
    patch_fuses(monkeypatch)
    cache, called = FoXCache(2, max_length=100), []
    found = [model(ids[:, :80], cache=cache, seq_start=seq_start)[:, :0]]
    for t in range(80, 84):
        if t == 83:
            model.model.layers[0].attn.q_norm.register_forward_hook(lambda *_: called.append(1))
        found.append(model(ids[:, t : t + 1], cache=cache))
    assert called == [1]  # a layer with a hook calls its modules
    assert relative_error(torch.cat(found, 1), model(ids, seq_start=seq_start)[:, 80:]) < 2e-5


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_without_a_cache_uses_the_kernels(dtype, monkeypatch):
    """In inference, for rows without padding; with gradients, the modules compute."""
    config = FoXConfig.pro(**{**SMALL, "log_pruning_tolerance": -10.0})
    model = with_strong_gates(FoXForCausalLM(config)).to(DEVICE, dtype)
    ids, called, kernel = (
        torch.randint(0, SMALL["vocab_size"], (2, 84), device=DEVICE),
        [],
        kernels.norm_and_gate,
    )
    monkeypatch.setattr(kernels, "norm_and_gate", lambda *x: called.append(1) or kernel(*x))
    monkeypatch.setattr(layers, "runs_kernels", lambda *_: not torch.is_grad_enabled())
    with torch.enable_grad():
        right = model(ids)
    model(ids, seq_start=torch.tensor([0, 3], device=DEVICE))
    assert not called
    for _ in range(CALLS):
        found = model(ids)
    assert len(called) == 2 * CALLS
    assert relative_error(found, right) < (2e-5 if dtype == torch.float32 else 0.05)
