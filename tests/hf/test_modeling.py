"""FoX through transformers matches FoX: logits, losses, gradients and generated texts."""

import copy
import json
import math

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

import acp_repro.hf
from acp_repro.model import FoXCache, FoXConfig, load_pretrained

from .tiny import SMALL, saved

SHAPES = [("pro", {"qk_norm_share_param_across_head": True}), ("llama", {}), ("rope", {})]


@pytest.fixture(params=SHAPES, ids=["pro", "llama", "rope"])
def both(request, tmp_path):
    architecture, fields = request.param
    ours = saved(tmp_path, architecture, **fields)
    return ours, AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.fixture
def ids():
    return torch.randint(2, SMALL["vocab_size"], (2, 90), generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients_are_bitwise_identical(both, ids):
    ours, theirs = both
    output = theirs(ids, labels=ids)
    expected = ours(ids)
    assert torch.equal(output.logits, expected)
    assert output.past_key_values is None  # gradients are recorded
    loss = ours.loss_per_token(ids[:, :-1], ids[:, 1:]).mean()
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    output.loss.backward()
    loss.backward()
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(named[name].grad, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
    theirs.gradient_checkpointing_enable()
    theirs.train()
    before = {name: p.grad.clone() for name, p in named.items()}
    theirs.zero_grad()
    theirs(ids, labels=ids).loss.backward()
    assert all(torch.equal(named[name].grad, grad) for name, grad in before.items())


def test_saved_model_loads_in_both_implementations(both, ids, tmp_path):
    ours, theirs = both
    theirs.save_pretrained(tmp_path / "again", max_shard_size="100KB")
    assert (tmp_path / "again" / "model.safetensors.index.json").is_file()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    theirs.save_pretrained(tmp_path / "whole")
    for folder in ("again", "whole"):
        assert torch.equal(load_pretrained(tmp_path / folder)(ids), ours(ids))


def test_greedy_and_sampled_generation_match_our_model(both, ids):
    ours, theirs = both
    assert torch.equal(theirs.generate(ids, max_new_tokens=12, do_sample=False), ours.generate(ids, 12))
    torch.manual_seed(0)
    drawn = theirs.generate(
        ids, max_new_tokens=12, do_sample=True, top_k=0, output_logits=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        whole = ours(drawn.sequences)[:, 89:-1]
    tolerance = 100 * math.exp(-10)  # largest pruning error of a logit
    torch.testing.assert_close(torch.stack(drawn.logits, 1), whole, atol=tolerance, rtol=0)


def test_beam_search_reorders_the_cache(both, ids):
    _, theirs = both
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    expected = theirs.generate(ids, use_cache=False, **options)
    assert torch.equal(theirs.generate(ids, **options), expected)


def test_left_padding_has_no_effect(both, ids):
    ours, theirs = both
    short, padding = ids[:1, :50], 23
    padded = torch.cat((torch.zeros(1, padding, dtype=torch.int64), short), 1)
    batch = torch.cat((padded, ids[1:, : 50 + padding]))
    mask = torch.ones_like(batch)
    mask[0, :padding] = 0
    with torch.no_grad():
        logits = theirs(batch, attention_mask=mask).logits
        torch.testing.assert_close(logits[0, padding:], ours(short)[0], atol=5e-4, rtol=1e-4)
        torch.testing.assert_close(logits[1], ours(batch[1:])[0], atol=5e-4, rtol=1e-4)
    out = theirs.generate(batch, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert torch.equal(out[0, padding:], ours.generate(short, 10)[0])
    assert torch.equal(out[1], ours.generate(batch[1:], 10)[0])


@torch.no_grad()
def test_right_padding_is_allowed_only_for_scoring(both, ids):
    ours, theirs = both
    mask = torch.ones_like(ids)
    mask[0, 60:] = 0
    output = theirs(ids, attention_mask=mask)
    torch.testing.assert_close(output.logits[0, :60], ours(ids[:1, :60])[0], atol=5e-4, rtol=1e-4)
    for more in ({}, {"use_cache": False}, {"max_new_tokens": 1}):
        with pytest.raises(ValueError, match="end with padding.*pad on the left"):
            theirs.generate(ids, attention_mask=mask, **{"max_new_tokens": 4, **more})
    past, padded = theirs(ids[:, :20]).past_key_values, {"past_key_values": output.past_key_values}
    holes = mask.clone()
    holes[1, 5] = 0
    for words, given, options in (
        ("pad on the left", ids[:, :1], padded),
        # As a custom generation loop calls the model.
        ("pad on the left", ids[:, :1], {"position_ids": mask.sum(1)[:, None], **padded}),
        (
            "zeros after the cached tokens",
            ids[:, 20:21],
            {"attention_mask": 1 - torch.eye(21)[19:].long(), "past_key_values": past},
        ),
        ("zeros between ones", ids, {"attention_mask": holes}),
        (r"the shape of input_ids, \(2, 90\)", ids, {"attention_mask": torch.ones(2, 1, 90, 90)}),
    ):
        with pytest.raises(ValueError, match=words):
            theirs(given, **options)


@pytest.mark.parametrize(("first_in", "beams"), [(torch.inference_mode, 1), (torch.no_grad, 2)])
def test_second_turn_continues_the_cache_of_the_first(both, ids, first_in, beams):
    ours, theirs = both
    with first_in():
        first = theirs.generate(
            ids[:, :40], max_new_tokens=6, num_beams=beams, do_sample=False, return_dict_in_generate=True
        )
    more, past = torch.cat((first.sequences, ids[:, 40:]), 1), first.past_key_values
    if beams == 1:
        second = theirs.generate(more, max_new_tokens=8, do_sample=False, past_key_values=past)
        assert torch.equal(second, ours.generate(more, 8))
    with first_in():
        past = theirs(more[:, :50], use_cache=True).past_key_values
        past.batch_select_indices(indices=torch.tensor([1, 0]))  # the transformers name of reordering
    with torch.no_grad():
        after = theirs(more.flip(0)[:, 50:], past_key_values=past).logits
        torch.testing.assert_close(after, ours(more.flip(0))[:, 50:], atol=5e-3, rtol=1e-3)


@torch.no_grad()
def test_reset_cache_equals_a_new_cache(both, ids):
    ours, theirs = both
    cache = acp_repro.hf.ForgettingTransformerCache(theirs.config, max_cache_len=90)
    mask = torch.ones_like(ids)
    mask[0, 60:] = 0  # right padding, which cannot be continued
    theirs(ids, attention_mask=mask, past_key_values=cache)
    cache.reset()
    parts = [theirs(part, past_key_values=cache).logits for part in (ids[:, :60], ids[:, 60:])]
    torch.testing.assert_close(torch.cat(parts, 1), ours(ids), atol=5e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="91 tokens are more than the cache's max_length 90"):
        theirs(ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_repeated_rows_continue_independently(both, ids):
    ours, theirs = both
    cache = theirs(ids[:, :50]).past_key_values
    cache.batch_repeat_interleave(2)
    four = torch.cat((ids, ids.flip(1)))[[0, 2, 1, 3]]  # rows 0 and 1 share the prefix of row 0
    whole = torch.cat((ids.repeat_interleave(2, 0)[:, :50], four[:, 50:]), 1)
    after = theirs(whole[:, 50:], past_key_values=cache).logits
    torch.testing.assert_close(after, ours(whole)[:, 50:], atol=5e-3, rtol=1e-3)


def test_input_embeddings_equal_input_ids(both, ids):
    ours, theirs = both
    embeddings = theirs.get_input_embeddings()(ids)
    assert torch.equal(theirs(inputs_embeds=embeddings).logits, ours(ids))
    new = theirs.generate(inputs_embeds=embeddings, max_new_tokens=5, do_sample=False)
    assert torch.equal(new, ours.generate(ids, 5)[:, 90:])
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        theirs(ids, inputs_embeds=embeddings)


def test_assisted_generation_equals_greedy(both, ids):
    """The same tokens for accepted drafts and for rejected, rolled-back drafts."""
    _, theirs = both
    plain = theirs.generate(ids[:1], max_new_tokens=12, do_sample=False)
    wrong = copy.deepcopy(theirs)
    with torch.no_grad():
        wrong.lm_head.weight.copy_(theirs.lm_head.weight.roll(1, 0))
    for assistant in (theirs, wrong):
        assert torch.equal(
            theirs.generate(ids[:1], max_new_tokens=12, do_sample=False, assistant_model=assistant), plain
        )
    assert torch.equal(
        theirs.generate(ids[:1], max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3), plain
    )


@torch.no_grad()
def test_invalid_caches_are_rejected(both, ids):
    _, theirs = both
    for words, options in (
        ("got DynamicCache", {"past_key_values": DynamicCache()}),
        ("is for a model", {"past_key_values": cache_for(num_heads=2)}),
        ("is for a model", {"past_key_values": cache_for(hidden_size=128)}),
        ("cache_implementation='static'", {"cache_implementation": "static"}),
        ("got FoXCache", {"past_key_values": FoXCache(2)}),
    ):
        with pytest.raises(ValueError, match=words):
            theirs.generate(ids, max_new_tokens=2, **options)
    theirs.config.output_attentions = True
    with pytest.raises(ValueError, match="stores attention weights"):
        theirs(ids)


def cache_for(**fields):
    config = acp_repro.hf.ForgettingTransformerConfig(**{**SMALL, **fields})
    return acp_repro.hf.ForgettingTransformerCache(config)


def test_hidden_states_and_the_last_logits(both, ids, tmp_path):
    ours, theirs = both
    with torch.no_grad():
        assert torch.equal(AutoModel.from_pretrained(tmp_path)(ids)[0], ours(ids, return_hidden=True))
        output = theirs(ids, output_hidden_states=True, logits_to_keep=1)
        torch.testing.assert_close(output.logits, ours(ids)[:, -1:], rtol=1e-5, atol=1e-5)
        assert len(output.hidden_states) == SMALL["num_hidden_layers"] + 1
        assert torch.equal(output.hidden_states[0], ours.model.embeddings(ids))
        assert torch.equal(output.hidden_states[-1], ours(ids, return_hidden=True))
        assert torch.equal(theirs.get_decoder()(ids, torch.ones_like(ids))[0], output.hidden_states[-1])
        some = theirs(ids, logits_to_keep=torch.tensor([70, 3])).logits
        torch.testing.assert_close(some, ours(ids)[:, [70, 3]], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_config_settings_are_call_defaults(ids, tmp_path):
    saved(tmp_path)
    for auto in (AutoModel, AutoModelForCausalLM):
        model = auto.from_pretrained(tmp_path)
        usual = model(ids)
        assert usual.hidden_states is None and usual.past_key_values.get_seq_length() == 90
        model.config.use_cache, model.config.output_hidden_states = False, True
        output = model(ids)
        assert output.past_key_values is None and len(output.hidden_states) == 3
        assert type(model(ids, return_dict=False)) is tuple


def test_config_fields(tmp_path):
    saved(tmp_path)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, log_pruning_tolerance=None)
    assert exact.model.layers[0].attn.log_pruning_tolerance is None
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.to_fox() == FoXConfig.pro(**SMALL) and config.num_attention_heads == 4
    with pytest.raises(ValueError, match="num_heads"):
        acp_repro.hf.ForgettingTransformerConfig(num_heads=0)
    assert acp_repro.hf.ForgettingTransformerConfig(use_rope=True).to_fox() == FoXConfig.rope()
    assert acp_repro.hf.ForgettingTransformerConfig(num_attention_heads=6).to_fox().num_heads == 6


def test_damaged_weights_and_pickles_are_rejected(tmp_path):
    model = saved(tmp_path)
    path = tmp_path / "model.safetensors"
    (tmp_path / "done.json").write_text(json.dumps({"sha256": "0"}))
    for given in ({}, {"subfolder": tmp_path.name}):
        with pytest.raises(ValueError, match=r"truncated or changed: .*done\.json"):
            AutoModelForCausalLM.from_pretrained(tmp_path.parent if given else tmp_path, **given)
    (tmp_path / "done.json").unlink()
    renamed, damaged = load_file(path), load_file(path)
    renamed["model.layers.0.attn.rotary.weight"] = renamed.pop("model.layers.0.attn.fgate_proj.weight")
    damaged["model.norm.weight"][0] = math.inf
    for tensors, message in (
        (renamed, r"missing model.layers.0.attn.fgate_proj.weight; unexpected .*rotary"),
        (damaged, "NaN or infinity"),
    ):
        save_file(tensors, path, metadata={"format": "pt"})
        for auto in (AutoModel, AutoModelForCausalLM):
            with pytest.raises(ValueError, match=message):
                auto.from_pretrained(tmp_path)
    path.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for asked in (None, False):
        with pytest.raises(OSError, match=r"model\.safetensors"):
            AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=asked)


def test_checkpoint_of_the_authors(official_pro):
    """tests/model/test_model_official.py compares our model with the authors' outputs; this test compares
    the transformers model with ours, bit for bit."""
    ids = load_file(official_pro / "expected.safetensors")["input_ids"].long()
    theirs = AutoModelForCausalLM.from_pretrained(official_pro, dtype=torch.float32)
    ours = load_pretrained(official_pro)
    assert theirs.config.eos_token_id is None  # 0 and 1 in the file are placeholders
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids))


@pytest.mark.parametrize(
    ("ids", "words", "end"), [((0, 1), 50257, 50256), ((0, 1), 50256, None), ((2, 1), 9, 1)]
)
def test_only_the_authors_id_pair_is_a_placeholder(ids, words, end):
    """GPT-2's end of text is id 50256, which a vocabulary of 50,256 words does not have."""
    config = acp_repro.hf.ForgettingTransformerConfig(
        vocab_size=words, bos_token_id=ids[0], eos_token_id=ids[1]
    )
    assert config.eos_token_id == end
