"""Attention implementations of transformers: names for FoX, and our kernels in transformers' models."""

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache

from acp_repro.hf import register_attention
from acp_repro.hf.attention_interface import alibi_log_fgate

from .tiny import saved

SHAPE = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


@pytest.fixture(scope="module")
def llama():
    register_attention("alibi")
    register_attention("alibi-acp", log_pruning_tolerance=-10.0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.4  # the default is 0.25
    return model


@pytest.fixture
def ids():
    return torch.randint(0, 64, (2, 150), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention"])
def test_other_implementations_are_rejected_in_one_line(tmp_path, name):
    saved(tmp_path, "pro")
    with pytest.raises(ValueError, match=r"\A.*runs on the kernels of acp_repro.attention.*\Z"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)


def run(model, name, ids, **inputs):
    model.set_attn_implementation(name)
    model.zero_grad()
    logits = model(ids, **inputs).logits
    logits.square().mean().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["alibi", "alibi-acp"])
def test_grouped_llama_with_alibi(llama, ids, name):
    query = torch.empty(2, 4, 150, 16)
    c = alibi_log_fgate(llama, query, query).cumsum(-1)
    bias = (c[..., :, None] - c[..., None, :]).masked_fill(torch.ones(150, 150).triu(1).bool(), float("-inf"))
    expected, gradients = run(llama, "eager", ids, attention_mask=bias)
    logits, found = run(llama, name, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_padding_caches_and_packed_documents(llama, ids):
    llama.set_attn_implementation("alibi")
    alone = llama(ids[:1]).logits
    mask = torch.ones(2, 160, dtype=torch.long)
    mask[0, :10] = 0
    padded = torch.cat((torch.zeros_like(ids[:, :10]), ids), 1)
    left = llama(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(left[:1, 10:], alone, rtol=1e-4, atol=1e-4)
    cache = llama(ids[:1, :100], use_cache=True).past_key_values
    rest = llama(ids[:1, 100:], past_key_values=cache).logits
    torch.testing.assert_close(rest, alone[:, 100:], rtol=1e-4, atol=1e-4)
    positions = torch.cat((torch.arange(50), torch.arange(150)))[None]
    packed = llama(torch.cat((ids[1:, :50], ids[:1]), 1), position_ids=positions).logits
    torch.testing.assert_close(packed[:, 50:], alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_unsupported_arguments_are_rejected(llama, ids):
    llama.set_attn_implementation("alibi")
    with pytest.raises(ValueError, match="does not support attention_mask of shape"):
        llama(ids, attention_mask=torch.zeros(2, 1, 150, 150))
    with pytest.raises(ValueError, match="zeros between ones"):
        llama(ids, attention_mask=torch.ones(2, 150).index_fill(1, torch.tensor([70]), 0))
    with pytest.raises(ValueError, match="DynamicCache"):
        llama(ids, past_key_values=StaticCache(llama.config, max_cache_len=200))
