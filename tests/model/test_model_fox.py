from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_helpers import SMALL, relative_error, with_strong_gates
from torch._subclasses.fake_tensor import FakeTensorMode

from acp_repro.model import FoXConfig, FoXForCausalLM, linear_cross_entropy
from acp_repro.model import loss as loss_module


def gradients(model: FoXForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_init_is_the_papers_and_follows_the_seed():
    config = FoXConfig.pro(**{**SMALL, "hidden_size": 128, "initializer_range": 0.05})
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(FoXForCausalLM(config))
    first, again, other = (m.state_dict() for m in models)
    for name, value in first.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, again[name])
        if "norm" in name:
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            assert not torch.equal(value, other[name])
            # Standard error of a standard deviation is std / sqrt(2 n); five of them.
            assert abs(value.std().item() / 0.05 - 1) < 5 / (2 * value.numel()) ** 0.5, name


def test_init_weights_fills_a_model_made_without_memory():
    config = FoXConfig.pro(**SMALL)
    torch.manual_seed(3)
    direct = FoXForCausalLM(config)
    with torch.device("meta"):
        late = FoXForCausalLM(config)
    late.to_empty(device="cpu")
    torch.manual_seed(3)
    late.init_weights()
    for (name, one), two in zip(direct.state_dict().items(), late.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def test_parameter_names_are_the_official_ones():
    def names(config):
        with torch.device("meta"):
            return set(FoXForCausalLM(config).state_dict())

    common = {"model.embeddings.weight", "model.norm.weight", "lm_head.weight"}
    block = (
        "attn_norm.weight",
        "attn.q_proj.weight",
        "attn.o_proj.weight",
        "attn.fgate_proj.weight",
        "attn.fgate_proj.bias",
        "mlp_norm.weight",
        "mlp.gate_proj.weight",
        "mlp.down_proj.weight",
    )
    pro = (
        "attn.k_proj.linear.weight",
        "attn.k_proj.shift_proj.weight",
        "attn.v_proj.linear.weight",
        "attn.v_proj.shift_proj.weight",
        "attn.ogate_proj.weight",
        "attn.output_norm.weight",
        "attn.q_norm.weight",
        "attn.k_norm.weight",
    )
    llama = ("attn.k_proj.weight", "attn.v_proj.weight")
    for config, own in ((FoXConfig.pro(**SMALL), pro), (FoXConfig.llama(**SMALL), llama)):
        expected = common | {f"model.layers.{n}.{name}" for n in (0, 1) for name in block + own}
        assert names(config) == expected


def test_gradient_checkpointing_gives_identical_gradients(small_model, small_ids):
    results = []
    for recompute in (False, True):
        small_model.gradient_checkpointing = recompute
        small_model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = small_model.loss_per_token(small_ids, small_ids.roll(-1, 1))
        loss.mean().backward()
        results.append((loss.detach(), gradients(small_model)))
    (loss, kept), (loss_again, recomputed) = results
    assert torch.equal(loss, loss_again)
    for name, gradient in kept.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, recomputed[name]), name


def test_gradient_checkpointing_computes_blocks_twice(small_model, small_ids):
    calls = []
    small_model.model.layers[0].attn.core.register_forward_hook(lambda *_: calls.append(1))
    small_model.gradient_checkpointing = True
    small_model.loss_per_token(small_ids, small_ids).mean().backward()
    assert len(calls) == 2
    with torch.no_grad():
        small_model.loss_per_token(small_ids, small_ids)
    assert len(calls) == 3


def test_logits_past_the_bound_are_not_kept(monkeypatch):
    monkeypatch.setattr(loss_module, "_KEPT_NUMBERS", 3 * 7 * 51)
    hidden, weight = torch.randn(2, 33, 24), torch.randn(51, 24, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(2, 33, dtype=torch.long), chunk_tokens=7)
    saved = loss.grad_fn.next_functions[0][0].saved_tensors
    assert sum(x.shape == (7, 51) for x in saved) == 3


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("line", "kept_numbers"), [(1, 1 << 20), (64, 1 << 20), (64, 1500), (17, 0)], ids=str
)
def test_loss_is_cross_entropy_of_the_logits(chunk_tokens, dtype, line, kept_numbers, monkeypatch):
    """Whether rows are filled up for a GPU's products or not, and logits kept or computed again."""
    monkeypatch.setitem(loss_module._LINE, "cpu", line)
    monkeypatch.setattr(loss_module, "_KEPT_NUMBERS", kept_numbers)
    torch.manual_seed(0)
    hidden = torch.randn(2, 33, 24, requires_grad=True)
    weight = torch.randn(51, 24, requires_grad=True)
    labels = torch.randint(0, 51, (2, 33))
    labels[1, 5:9] = -100
    arriving = torch.randn(2, 33)

    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens)
    assert loss.shape == (2, 33) and loss.dtype == torch.float32
    assert (loss[1, 5:9] == 0).all()
    ours = (loss, *torch.autograd.grad(loss, (hidden, weight), arriving))

    def plain(hidden, weight, autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = F.linear(hidden, weight)
        logits = logits.float() if autocast else logits
        loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (loss, *torch.autograd.grad(loss, (hidden, weight), arriving.to(loss.dtype)))

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    right = plain(*wide, autocast=False)
    eager = plain(hidden, weight, autocast=dtype == torch.bfloat16)
    for what, our, eager_one, right_one in zip(("loss", "hidden", "weight"), ours, eager, right, strict=True):
        # The budget: eager's error in this dtype, a little more for sums split into chunks.
        budget = 1.5 * relative_error(eager_one, right_one) + 4 * 2.0**-24
        assert relative_error(our, right_one) <= budget, what


def test_loss_can_be_differentiated_twice_over(small_model, small_ids):
    """The kept logits are not overwritten by the first backward pass."""
    loss = small_model.loss_per_token(small_ids, small_ids).mean()
    weight = small_model.lm_head.weight
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, weight)[0])


def test_loss_of_the_model_is_that_of_its_logits(small_model, small_ids):
    labels = small_ids.roll(-1, 1)
    with torch.no_grad():
        logits = small_model(small_ids)
        hidden = small_model(small_ids, return_hidden=True)
        loss = small_model.loss_per_token(small_ids, labels)
    assert logits.shape == (2, 150, 97) and hidden.shape == (2, 150, 64)
    assert torch.equal(small_model.lm_head(hidden), logits)
    expected = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(loss, small_model(small_ids, labels=labels))


def test_causality(small_model, small_ids):
    changed = small_ids.clone()
    changed[:, 100:] = (changed[:, 100:] + 1) % SMALL["vocab_size"]
    # Pruning with bounds from norms looks at every token's norm, so exact is what is causal bit by bit.
    small_model.set_log_pruning_tolerance(None)
    with torch.no_grad():
        one, two = small_model(small_ids), small_model(changed)
    torch.testing.assert_close(one[:, :100], two[:, :100], rtol=1e-5, atol=1e-5)
    assert (one[:, 100:] != two[:, 100:]).any()


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_into_one_graph(small_model, small_ids, autocast):
    """aot_eager traces forward and backward without generating code, so this needs no compiler."""

    def run(model, autocast):
        small_model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(small_ids, labels=small_ids.roll(-1, 1))
        loss.mean().backward()
        return {"loss": loss.detach(), **gradients(small_model)}

    exact, plain = run(small_model, False), run(small_model, autocast)
    torch.compiler.reset()
    compiled = run(torch.compile(small_model, backend="aot_eager", fullgraph=True), autocast)
    # It joins products, which rounds elsewhere, and no more: eager without autocast is the measure of both.
    for name, right in exact.items():
        error = relative_error(compiled[name], right)
        assert error <= 2 * relative_error(plain[name], right) + 1e-4, name


@pytest.mark.parametrize(
    "ids", [torch.zeros(3), torch.zeros(1, 3), torch.zeros(1, 0).long(), torch.zeros(3).long()]
)
def test_wrong_input_ids_are_named(ids):
    model = FoXForCausalLM(FoXConfig.pro(**SMALL))
    with pytest.raises(ValueError, match=r"input_ids must be integers of shape \(batch, time\)"):
        model(ids)


@pytest.mark.parametrize("wrong", [-1, SMALL["vocab_size"]])
def test_ids_outside_the_vocabulary_are_named(small_ids, wrong):
    model = FoXForCausalLM(FoXConfig.pro(**SMALL))
    ids = small_ids.clone()
    ids[0, -1] = wrong
    message = rf"input_ids must be 0 or more and below vocab_size {SMALL['vocab_size']}, got {wrong}$"
    with pytest.raises(ValueError, match=message):
        model(ids)
    with pytest.raises(ValueError, match=message):
        model.generate(ids, max_new_tokens=1)


def test_shapes_alone_can_be_asked_for(small_ids):
    """A forward looks at no number, so tensors without numbers pass."""
    model = FoXForCausalLM(FoXConfig.pro(**SMALL))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(small_ids).shape == (*small_ids.shape, SMALL["vocab_size"])


def test_wrong_labels_are_named(small_ids):
    model = FoXForCausalLM(FoXConfig.pro(**SMALL))
    for labels in (small_ids[:, 1:], small_ids.float()):
        with pytest.raises(ValueError, match="labels must be integers of the shape of input_ids"):
            model.loss_per_token(small_ids, labels)


def test_a_model_learns():
    """All parts together: a few steps on one repeated sequence bring the loss down."""
    torch.manual_seed(0)
    model = FoXForCausalLM(FoXConfig.pro(**SMALL), gradient_checkpointing=True)
    assert model.gradient_checkpointing and model.model.gradient_checkpointing
    ids = torch.randint(0, 97, (2, 65), generator=torch.Generator().manual_seed(2))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model.loss_per_token(ids[:, :-1], ids[:, 1:]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert abs(losses[0] - torch.log(torch.tensor(97.0)).item()) < 0.2  # uniform at the start
    assert losses[-1] < 0.5 * losses[0]


def test_strong_gates_do_prune():
    """The models of these tests exercise pruning, or they would test nothing."""
    torch.manual_seed(0)
    model = with_strong_gates(FoXForCausalLM(FoXConfig.llama(**SMALL)))
    seen = []
    model.model.layers[0].attn.core.register_forward_hook(lambda m, args, out: seen.append(args))
    model(torch.randint(0, 97, (1, 300)))
    ((_, _, _, log_fgate, threshold, *_),) = seen
    assert (log_fgate.sum(-1) < threshold).any() and (log_fgate.sum(-1) > threshold).any()
