"""Kept keys in the heads of any decoder: transformers is the reference, and no row loses epsilon."""

import dataclasses
import functools
import math
import re

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acp_repro import FoXConfig, FoXForCausalLM, inspect
from acp_repro.explorer.blocks import BLOCK, known_afterwards, seen_on_the_way
from acp_repro.explorer.decoders import NotReadable, read_layers
from acp_repro.explorer.read import read_heads
from acp_repro.explorer.weights import head_weights
from acp_repro.model import save_pretrained
from tests.conftest import REPO_ROOT, SHIPPED
from tests.test_heads import small_model

transformers = pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")
T = 150
# Documented model types, with their differences from the common sizes.
LISTED = re.findall(
    r"`([\w-]+)`", (REPO_ROOT / "docs/heads.md").read_text().split("<!-- model types")[1].split("<!-- end")[0]
)
TINY = {
    **{"vocab_size": 97, "intermediate_size": 48, "max_position_embeddings": 256},
    **{"bos_token_id": 0, "eos_token_id": 0, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64, "decoder_ffn_dim": 48},
    **dict.fromkeys(("n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_layers", "n_layer", "n_layers", "decoder_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_head"), 16),
    **dict.fromkeys(("head_dim", "sliding_window", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mamba_n_heads"), 8),
    **dict.fromkeys(("n_group", "topk_group", "encoder_layers"), 1),
    **{"num_key_value_heads": 2, "q_lora_rank": 32, "mamba_d_state": 8, "pad_token_id": 0},
}
HEADS_OF_16, UNGROUPED = {"head_dim": 16}, {"num_key_value_heads": 4}
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
OWN = {
    **dict.fromkeys(("deepseek_v3", "longcat_flash", "youtu"), LATENT),
    **dict.fromkeys(("glm4_moe_lite", "minicpm3"), UNGROUPED),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), HYBRID),
    **dict.fromkeys(("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe"), HEADS_OF_16),
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 128},
}


def tiny_model(model_type: str, auto=transformers.AutoModelForCausalLM, **own):
    """A tiny model whose class reads ``model_type``, with random weights."""
    default = transformers.CONFIG_MAPPING[model_type]()
    sizes = {name: value for name, value in TINY.items() if getattr(default, name, None) is not None}
    sizes |= {"pad_token_id": 0} | OWN.get(model_type, {}) | own
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**sizes)
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 2 or not weight.isfinite().all():
            weight.data.normal_(0, 0.15)
        if name.endswith("sinks"):
            weight.data.normal_(3, 1)
    return model


def largest_difference(inputs, weights) -> float:
    """Largest difference between rows of the explorer and of eager attention, normalised without a sink."""
    c, worst = inputs.c, 0.0
    for head in range(inputs.q.shape[1]):
        rows = head_weights(
            inputs.q[0, head],
            inputs.k[0, head * inputs.k.shape[1] // inputs.q.shape[1]],
            None if c is None else c[head],
            None,
            grid=(BLOCK, BLOCK),
            cell=1,
            scaling=inputs.scaling,
            softcap=inputs.softcap,
            window_size=inputs.window_size,
            sink=None if inputs.sinks is None else inputs.sinks[head],
        ).cells
        found, expected = (x / x.sum(-1, keepdim=True) for x in (rows, weights[0, head]))
        worst = max(worst, float((found - expected).abs().max()))
    return worst


@pytest.fixture
def ids():
    return torch.randint(0, 97, (1, T), generator=torch.Generator().manual_seed(1))


def test_listed_model_types_match_eager_attention(ids):
    known = [name for name in LISTED if name in transformers.CONFIG_MAPPING]
    assert len(LISTED) == len({*LISTED}) and len(known) > 50
    far = {}
    for name in known:
        model, seen = tiny_model(name), {}
        read_layers(model, ids, seen.__setitem__)
        assert model.config._attn_implementation == "eager"
        with torch.no_grad():
            weights = [x for x in model(ids, output_attentions=True).attentions if x is not None]
            layers = sorted(seen) if len(weights) == len(seen) else range(len(weights))
            of_layer = dict(zip(layers, weights, strict=True))
            far[name] = max(largest_difference(inputs, of_layer[layer]) for layer, inputs in seen.items())
    assert max(far.values()) < 5e-6, far


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "mimo_v2_flash"])  # a window, and learned sinks
def test_table_matches_the_weights_of_eager_attention(name, ids, monkeypatch):
    """A sink is an extra logit of each row: it has no key and reduces the weights of the keys."""
    monkeypatch.setattr("acp_repro.explorer.weights.CHUNK_SCORES_CPU", 1)  # two chunks
    model = tiny_model(name, sliding_window=70)
    model = model.double() if name == "mistral" else model  # float64 has no grouped product of experts
    with torch.no_grad():
        weights = torch.stack(model(ids, output_attentions=True).attentions).double().flatten(0, 2)
    found = read_heads(model, ids)
    table, falling = found.table, weights.sort(-1, descending=True).values.cumsum(-1)
    for share in (0.9, 0.99, 0.999):
        keys = (1 + (falling < share * falling[..., -1:].clamp(max=1)).sum(-1)).double()
        assert table[f"keys_{100 * share:g}"].tolist() == keys.median(-1).values.tolist()
        assert table[f"q90_keys_{100 * share:g}"].tolist() == pytest.approx(keys.quantile(0.9, -1).tolist())
    for column, expected in (
        ("entropy_nats", torch.special.entr(weights).sum(-1).mean(-1)),
        ("first_token_weight", weights[:, :, 0].mean(-1)),
        ("sink_weight", 1 - weights.sum(-1).mean(-1)),
    ):
        assert table[column].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert (table["known"] == 0).all()  # no decay; one block of the third block row is outside the window
    assert (table["seen_1e-2"] <= table["after_1e-2"]).all() and "<table" in found._repr_html_()


def test_reading_is_independent_of_and_preserves_training_mode(ids):
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5)
    expected = read_heads(model, ids).table
    model.train().transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    assert read_heads(model, ids).table.equals(expected)
    assert [module.training for module in model.modules()] == modes and {*modes} == {True, False}
    with pytest.raises(NotReadable, match="300 tokens are more than the model's 256 positions"):
        read_heads(model, torch.zeros(300, dtype=torch.long))
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(("surplus", "kept"), [(1.0001, True), (0.9999, False)])
def test_running_sum_bound_is_tight(surplus, kept):
    """A row whose last block has equal weights and whose other keys reach the prunable weight."""
    epsilon, length = 1e-2, 64 * BLOCK
    scores = torch.full((1, length), math.log(surplus * epsilon * BLOCK / length), dtype=torch.float64)
    scores[:, -BLOCK:] = 0.0
    tiles = scores.softmax(-1).view(1, -1, BLOCK)
    visible = torch.tensor([length])
    left_out = seen_on_the_way(tiles.amax(-1), tiles.sum(-1), visible, epsilon)
    assert left_out.tolist() == [True] * 62 + [not kept, False]  # a kept block raises the sum
    lost = tiles[:, left_out].sum()
    assert kept or 0.95 * epsilon < lost < epsilon


@given(
    seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.1, 3.0, 30.0, 300.0]), log2=st.integers(-30, -1)
)
def test_blocks_match_a_sequential_kernel(seed, spread, log2):
    """Scores that increase, decrease or jump to the left, rows with few visible keys, and any epsilon."""
    generator, epsilon = torch.Generator().manual_seed(seed), 2.0**log2
    rows, blocks, width = 4, 9, 8
    scores = spread * torch.randn(rows, blocks, width, generator=generator, dtype=torch.float64)
    scores += spread * torch.randn(1, blocks, 1, generator=generator, dtype=torch.float64)
    scores[:, :, 1:] -= spread * torch.randint(0, 3, (rows, blocks, 1), generator=generator)
    visible = torch.randint(1, blocks * width + 1, (rows, 1), generator=generator)
    hidden = torch.arange(blocks * width) < blocks * width - visible  # outside the row's window
    weights = scores.flatten(1).masked_fill(hidden, -math.inf).softmax(-1).view_as(scores)
    visible = visible[:, 0]
    running = torch.zeros(rows, dtype=torch.float64)
    expected = []
    for block in reversed(range(blocks)):
        left_out = bool((weights[:, block].amax(-1) * visible / epsilon < running).all())
        running += 0 if left_out else weights[:, block].sum(-1)
        expected.insert(0, left_out)
    found = seen_on_the_way(weights.amax(-1), weights.sum(-1), visible, epsilon)
    assert found.tolist() == expected and not found[-1]
    assert weights[:, found].sum((1, 2)).max() < epsilon
    oracle = known_afterwards(weights.sum(-1), epsilon)
    assert weights[:, oracle].sum((1, 2)).max() < epsilon * (1 + 1e-12)


def test_alibi_is_certified(ids):
    model, seen = tiny_model("bloom"), {}
    for weight in model.parameters():
        weight.data.mul_(0.2)
    table, stricter = (
        read_heads(model, ids.repeat(1, 8), log_pruning_tolerance=x).table for x in (None, -60)
    )
    assert table["known"].max() > 0.1 and table["known"].mean() > stricter["known"].mean()
    assert (table["known"] <= table["seen_e-10"]).all() and (table["seen_e-10"] <= table["after_e-10"]).all()
    read_layers(model, ids, seen.__setitem__)
    assert (-seen[0].c[:, 1]).tolist() == pytest.approx([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    with pytest.raises(ValueError, match="must be negative and finite .* got 0"):  # and not the default
        read_heads(model, ids, log_pruning_tolerance=0)


def test_fox_is_certified_by_acp():
    hf = pytest.importorskip("acp_repro.hf", reason="pip install -e '.[transformers]'")
    model = small_model()
    ids = torch.randint(0, 256, (2, 512), generator=torch.Generator().manual_seed(0))
    before = model(ids)
    read_heads(model, ids, log_pruning_tolerance=-3)
    assert [block.attn.log_pruning_tolerance for block in model.model.layers] == [-10, -10]
    assert torch.equal(model(ids), before)
    table = read_heads(model, ids).table
    assert len(table) == 4 and table["known"].max() > 0.3
    copy = hf.ForgettingTransformerForCausalLM(
        hf.ForgettingTransformerConfig(**dataclasses.asdict(model.config))
    )
    copy.model.load_state_dict(model.model.state_dict())
    assert read_heads(copy, ids).table.equals(table)
    assert (table["known"] <= table["seen_e-10"] + 1e-12).all()
    assert (table["seen_e-10"] <= table["after_e-10"] + 1e-12).all()


class Norms:
    """Keeps keys of small norm, as KnormPress of kvpress does."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


class Press:
    """Needs the inputs of kvpress presses: the model, RoPE's angles and the weights of eager attention."""

    seen = ()

    def post_init_from_model(self, model):
        self.model = model

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        cos, _ = kwargs["position_embeddings"]
        assert attentions is not None
        assert torch.equal(module.rotary_emb(hidden_states, torch.arange(T)[None])[0], cos)
        assert module in self.model.modules() and kwargs["hidden_states"] is hidden_states
        self.seen += (attentions,)
        return attentions.unflatten(1, (keys.shape[1], -1)).sum((2, 3))


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # Gemma 2 has a soft cap and a window
def test_scorers_follow_the_kvpress_calling_convention(name, ids):
    model, press = tiny_model(name), Press()
    modules = {name for name, _ in model.named_modules()}
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    table = read_heads(model, ids, scorers={"press": press, "norms": Norms()}, budget=0.2).table
    for seen, weights in zip(press.seen, expected, strict=True):
        assert (seen - weights).abs().max() < 1e-6
    assert {name for name, _ in model.named_modules()} == modules  # RoPE's module is removed from each layer
    for other in ("press", "norms", "window", "random"):
        assert (table["lost_oracle"] <= table[f"lost_{other}"]).all()
    late = T - T // 8  # 132 keys, of which 26 stay in the window: 0 to 3 and 110 to 131
    weights = torch.stack(expected).flatten(0, 2).double()
    lost = weights[:, late:, 4:110].sum((1, 2)) / (T - late)
    assert table["lost_window"].tolist() == pytest.approx(lost.tolist(), abs=1e-5)
    everything = read_heads(model, ids, scorers={"norms": Norms()}, budget=1.0).table
    assert everything["lost_norms"].abs().max() < 1e-6


def test_decoder_command_writes_its_page(tmp_path, capsys):
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    np.save(tmp_path / "ids.npy", np.arange(2 * T) % 97)
    given = [str(tmp_path / "llama"), "--token-ids", str(tmp_path / "ids.npy"), "--context-length", str(T)]
    page, table = tmp_path / "heads.html", tmp_path / "heads.csv"
    assert inspect.main([*given, "--tokens", str(2 * T), "--html", str(page), "--csv", str(table)]) == 0
    assert len(pd.read_csv(table)) == 8 and page.is_file()
    assert inspect.main([*given, "--html", str(page), "--compare", str(SHIPPED)]) == 2
    assert inspect.main([str(tmp_path / "llama")]) == 2
    assert "has no tokenizer; give token ids" in capsys.readouterr().err


def test_rope_baseline_is_read_like_any_decoder(ids, tmp_path, capsys):
    shape = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
    for name in ("rope", "pro"):
        torch.manual_seed(1)
        save_pretrained(model := FoXForCausalLM(getattr(FoXConfig, name)(**shape)), tmp_path / name)
        assert bool(read_heads(model, ids).table["known"].any()) == (name == "pro")
    np.save(tmp_path / "ids.npy", ids.repeat(1, 2).numpy())
    page, rules = tmp_path / "heads.html", tmp_path / "rules.json"
    given = ["--token-ids", str(tmp_path / "ids.npy"), "--html", str(page), "--rules", str(rules)]
    given += ["--context-length", str(2 * T), "--compare", str(tmp_path / "pro")]
    assert inspect.main([str(tmp_path / "rope"), *given]) == 0
    assert page.is_file() and "ACP" not in rules.read_text()
    assert "not applicable: ACP, FSA gate test on decay: the model has no" in capsys.readouterr().out


def with_argument(name: str, value):
    """A Llama whose second layer passes one more argument to its attention."""
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = functools.partial(attention.forward, **{name: value})
    return model


def with_repeated_layer():
    model = tiny_model("llama")
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers = 3
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_model("bert", transformers.AutoModel), "BertModel cannot be read: layer 0: sees later"),
        (lambda: tiny_model("gptj", rotary_dim=4), "it calls no attention function of transformers"),
        (with_repeated_layer, "layer 0 attends more than once"),
        (lambda: with_argument("indices", torch.zeros(1)), "LlamaForCausalLM .*: layer 1 passes indices to"),
        (lambda: with_argument("block_indices", torch.zeros(1)), "layer 1 passes block_indices to its"),
    ],
)
def test_weights_that_do_not_follow_from_q_k_and_a_mask_are_rejected(make, message, ids):
    model = make()
    with pytest.raises(NotReadable, match=message):
        read_heads(model, ids)
    assert model.config._attn_implementation == "eager"


def test_harmless_arguments_are_accepted_and_scorers_require_transformers_attention(ids):
    expected = read_heads(tiny_model("llama"), ids).table
    for value in (None, False):
        assert read_heads(with_argument("indices", value), ids).table.equals(expected)
    for model, name in ((small_model(), "FoX"), (tiny_model("bloom"), "BloomForCausalLM")):
        with pytest.raises(NotReadable, match=f"this one is a {name}"):
            read_heads(model, ids, scorers={"norms": Norms()})
