import pytest
import torch
import torch.nn.functional as F
from model_helpers import SMALL, relative_error, with_strong_gates

from acp_repro.model import FoXCache, FoXConfig, FoXForCausalLM, linear_cross_entropy
from acp_repro.model import loss as loss_module


def gradients(model: FoXForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_initialisation_matches_the_paper_and_follows_the_seed():
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


def test_parameter_names_match_the_official_ones():
    def names(config):
        with torch.device("meta"):
            return set(FoXForCausalLM(config).state_dict())

    common = {"model.embeddings.weight", "model.norm.weight", "lm_head.weight"}
    block = "attn_norm attn.q_proj attn.o_proj attn.fgate_proj mlp_norm mlp.gate_proj mlp.down_proj"
    pro = "attn.k_proj.linear attn.k_proj.shift_proj attn.v_proj.linear attn.v_proj.shift_proj"
    pro += " attn.ogate_proj attn.output_norm attn.q_norm attn.k_norm"
    for config, own in ((FoXConfig.pro(**SMALL), pro), (FoXConfig.llama(**SMALL), "attn.k_proj attn.v_proj")):
        tensors = [f"{name}.weight" for name in f"{block} {own}".split()] + ["attn.fgate_proj.bias"]
        assert names(config) == common | {f"model.layers.{n}.{name}" for n in (0, 1) for name in tensors}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("chunk_tokens", "line", "kept_numbers"), [(1, 1, 2**20), (7, 64, 1500), (64, 17, 0), (1000, 64, 2**20)]
)
def test_loss_is_cross_entropy_of_the_logits(chunk_tokens, dtype, line, kept_numbers, monkeypatch):
    """With and without padded vocabulary rows, and with stored or recomputed logits."""
    monkeypatch.setitem(loss_module._LINE, "cpu", line)
    monkeypatch.setattr(loss_module, "_KEPT_NUMBERS", kept_numbers)
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
        # The budget: the eager error in this dtype, with a margin for chunked sums.
        budget = 1.5 * relative_error(eager_one, right_one) + 4 * 2.0**-24
        assert relative_error(our, right_one) <= budget, what


def test_weight_gradient_is_accumulated_in_float32():
    """In bfloat16, a sum of 1,000 equal numbers saturates at 256 of them."""
    hidden, weight = torch.ones(1, 1000, 8), torch.zeros(2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, torch.zeros(1, 1000).long(), chunk_tokens=1)
    (gradient,) = torch.autograd.grad(loss.sum(), weight)
    assert gradient[:, 0].tolist() == pytest.approx([-500, 500])


def test_padding_rows_of_the_vocabulary_have_zero_gradient(monkeypatch):
    """Their logits are 0, far above the vocabulary's logits of -1,000."""
    monkeypatch.setitem(loss_module._LINE, "cpu", 64)
    hidden, weight = torch.ones(1, 3, 10, requires_grad=True), torch.full((51, 10), -100.0)
    linear_cross_entropy(hidden, weight, torch.zeros(1, 3).long()).sum().backward()
    assert hidden.grad.abs().max() < 1e-3


def test_model_loss_equals_the_loss_of_its_logits(small_model, small_ids):
    labels = small_ids.roll(-1, 1)
    with torch.no_grad():
        logits = small_model(small_ids)
        hidden = small_model(small_ids, return_hidden=True)
        loss = small_model.loss_per_token(small_ids, labels)
        assert torch.equal(loss, small_model(small_ids, labels=labels))
    assert logits.shape == (2, 150, 97) and hidden.shape == (2, 150, 64)
    assert torch.equal(small_model.lm_head(hidden), logits)
    expected = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    small_model.lm_head.bias = torch.nn.Parameter(torch.randn(97))
    expected = F.cross_entropy(small_model(small_ids).transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(small_model.loss_per_token(small_ids, labels), expected)


@pytest.mark.parametrize("small_config", ["pro", "llama", "rope"], indirect=True)
@pytest.mark.slow
def test_compiles_into_one_graph(small_model, small_ids):
    """aot_eager traces forward and backward without generating code, so this needs no compiler."""

    def run(model, autocast):
        small_model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(small_ids, labels=small_ids.roll(-1, 1))
        loss.mean().backward()
        return {"loss": loss.detach(), **gradients(small_model)}

    exact, plain = run(small_model, False), run(small_model, True)
    torch.compiler.reset()
    compiled = run(torch.compile(small_model, backend="aot_eager", fullgraph=True), True)
    # Fused products round at other places; both are compared with eager code without autocast.
    for name, right in exact.items():
        error = relative_error(compiled[name], right)
        assert error <= 2 * relative_error(plain[name], right) + 1e-4, name


@pytest.mark.slow
def test_exported_program_is_bitwise_identical(tmp_path):
    """Reloaded from a file, for another batch and length; pruning depends on the gates."""
    model = with_strong_gates(FoXForCausalLM(FoXConfig.pro(**SMALL, log_pruning_tolerance=-10.0))).eval()
    auto = torch.export.Dim.AUTO
    with torch.no_grad():
        ids = torch.randint(0, 97, (2, 130))
        program = torch.export.export(model, (ids,), dynamic_shapes={"input_ids": {0: auto, 1: auto}})
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2").module()
        for shape in ((2, 130), (3, 300)):
            ids = torch.randint(0, 97, shape)
            assert torch.equal(loaded(ids), model(ids))


IDS = torch.zeros(1, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": IDS.float()}, r"input_ids must be integers of shape \(batch, time\)"),
        ({"input_ids": IDS[:, :0]}, r"input_ids must be integers of shape \(batch, time\)"),
        ({"input_ids": IDS[0]}, r"input_ids must be integers of shape \(batch, time\)"),
        ({"input_ids": IDS.bool()}, r"input_ids must be integers of shape \(batch, time\)"),
        ({"input_ids": IDS - 1}, "input_ids must be 0 or more and below vocab_size 97, got -1$"),
        ({"input_ids": IDS + 97}, "input_ids must be 0 or more and below vocab_size 97, got 97$"),
        ({"labels": IDS.float()}, r"labels must be integers of the shape of input_ids \(1, 3\)"),
        ({"labels": IDS[:, 1:]}, r"labels must be integers of the shape of input_ids \(1, 3\)"),
        ({"cu_seqlens": torch.tensor([0, 3]), "cache": FoXCache(2)}, "cache cannot hold packed documents"),
        ({"cu_seqlens": torch.tensor([0, 3]), "input_ids": IDS.repeat(2, 1)}, "batch of one"),
    ],
)
@torch.no_grad()
def test_invalid_arguments_are_rejected(given, message):
    model = FoXForCausalLM(FoXConfig.pro(**SMALL))
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": IDS, **given})
