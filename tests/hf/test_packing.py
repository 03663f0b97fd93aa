"""Packed rows of transformers' collator, and keywords of ``forward``."""

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")

from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

import acp_repro.hf  # noqa: F401

from .tiny import SMALL, saved

LENGTHS = (63, 1, 65, 20)


@pytest.fixture(params=["pro", "llama"])
def model(request, tmp_path):
    saved(tmp_path, request.param, log_pruning_tolerance=-30.0)
    return AutoModelForCausalLM.from_pretrained(tmp_path).train()


@pytest.fixture
def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, SMALL["vocab_size"], (n,), generator=generator) for n in LENGTHS]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"return_flash_attn_kwargs": True, "return_seq_idx": True}, marks=pytest.mark.slow),
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
        {"return_seq_idx": True, "return_position_ids": False},
    ],
    ids=str,
)
def test_collator_packs_independent_documents(model, documents, options):
    collator = DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collator([{"input_ids": d.tolist()} for d in documents])
    compiled = len(options) == 2 and "return_position_ids" not in options
    parts = [model(d[None], labels=d[None]) for d in documents if len(d) > 1]
    weights = [len(d) - 1 for d in documents if len(d) > 1]
    loss = sum(w * part.loss for w, part in zip(weights, parts, strict=True)) / sum(weights)
    right = torch.cat([model(d[None]).logits for d in documents], 1)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    torch.compiler.reset()
    call = torch.compile(model, backend="eager") if compiled else model
    packed = call(**batch)
    scale = right.abs().max()
    assert (packed.logits - right).abs().max() < 1e-5 * scale
    assert packed.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for found, expected in zip(
        torch.autograd.grad(packed.loss, list(model.parameters())), wanted, strict=True
    ):
        assert (found - expected).norm() <= 1e-4 * expected.norm()
    with torch.no_grad():
        assert model(**batch).past_key_values is None
        with pytest.raises(ValueError, match="use_cache"):
            model(**batch, use_cache=True)


@torch.no_grad()
def test_row_positions_have_no_effect(model, documents):
    ids = torch.stack((documents[0], documents[2][:63]))
    ids[0, :9] = 0
    mask = (torch.arange(63) >= torch.tensor([[9], [0]])).long()
    right = model(ids, attention_mask=mask).logits
    for positions in (torch.arange(63)[None], (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)):
        assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, right)
        cache = model(
            ids[:, :50], attention_mask=mask[:, :50], position_ids=positions[:, :50]
        ).past_key_values
        last = model(ids[:, 50:], attention_mask=mask, position_ids=positions[:, 50:], past_key_values=cache)
        torch.testing.assert_close(last.logits, right[:, 50:], rtol=1e-4, atol=1e-4)
    cache = model(ids[:, :50], attention_mask=mask[:, :50]).past_key_values
    with pytest.raises(ValueError, match="position_ids must count"):
        model(ids[:, 50:], position_ids=positions[:, 49:62], past_key_values=cache)


@torch.no_grad()
def test_unused_forward_arguments_are_rejected(model, documents):
    ids, count = documents[0][None], torch.arange(63)[None]
    packed = torch.cat((count[:, :30], count[:, :33]), 1)
    for words, options in (
        ("position_ids must count", {"position_ids": count * 2}),
        (
            "position_ids and cu_seq_lens_q",
            {"position_ids": packed, "cu_seq_lens_q": torch.tensor([0, 31, 63])},
        ),
        ("cu_seq_lens_q must", {"cu_seq_lens_q": torch.tensor([0, 30])}),
        ("cu_seq_lens_q must", {"cu_seq_lens_q": torch.tensor([1, 63])}),
        ("cu_seq_lens_q must", {"cu_seq_lens_q": torch.tensor([0, 40, 30, 63])}),
        ("one row, got 2 rows", {"input_ids": ids.repeat(2, 1), "position_ids": packed}),
        ("is_causal, token_type_ids", {"is_causal": False, "token_type_ids": count}),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            model(**{"input_ids": ids, **options})
    right = model(ids, labels=ids).loss
    usual = {"use_cache": False, "output_attentions": False, "cache_position": count[0]}
    found = model(ids, labels=ids, num_items_in_batch=31, inputs_embeds=None, **usual)
    torch.testing.assert_close(found.loss, right * 2)
