"""Texts, settings and folders that cannot be: each is one error in words."""

import json

import pytest
import transformers
from safetensors.torch import load_file, save_file

from acp_repro.lap import PruningAutoencoder, PruningConfig, PruningError
from tests.lap.tiny import SHAPE, TEXTS, model, tokenizer


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a cat", ""], "text 2 of 2 is empty"),
        ([TEXTS[2]], r"text 1 of 1 has \d+ tokens with its EOS, and the model's maximum is 8"),
        ("a cat", "give a list of at least one text"),
        ([], "at least one text"),
        (["a cat", None], "text 2 of 2 must be a string, got NoneType"),
        (["a cat", "a \udcff"], "text 2 of 2 has a stray byte at place 3"),
    ],
)
def test_what_is_no_text_is_refused(texts, words):
    with pytest.raises(PruningError, match=words):
        model(max_length=8).encode(texts)


def test_a_text_may_have_as_many_tokens_as_the_model_reads():
    length = model().token_ids([TEXTS[0]]).shape[1]  # with its EOS
    assert model(max_length=length).encode([TEXTS[0]]).lengths.tolist() == [length]
    with pytest.raises(PruningError, match=f"has {length} tokens with its EOS"):
        model(max_length=length - 1).encode([TEXTS[0]])


def test_a_tokenizer_of_another_model_is_refused():
    reader = tokenizer()
    fits = {"vocab_size": reader.vocab_size, "pad_token_id": reader.pad_id, "eos_token_id": reader.eos_id}
    for wrong in ({"vocab_size": reader.vocab_size - 1}, {"pad_token_id": 0}, {"eos_token_id": 1}):
        config = transformers.T5Config(**fits | wrong, decoder_start_token_id=0, **SHAPE)
        with pytest.raises(
            PruningError, match=r"the tokenizer has \d+ ids.* take the tokenizer of its train"
        ):
            PruningAutoencoder(transformers.T5ForConditionalGeneration(config), PruningConfig(), reader)


def test_a_text_without_eos_is_refused():
    """Of one whose gates all close nothing would be left."""
    built = model(beta=-1e4)
    ids = built.token_ids(TEXTS)
    ids[1, ids[1] == built.t5.config.eos_token_id] = 5
    with pytest.raises(PruningError, match=f"has no EOS, id {built.t5.config.eos_token_id}"):
        built.encode_ids(ids)


def save_plain_t5(folder, **settings):
    """A folder of a T5 without gates, with the tokeniser of the tests."""
    reader = tokenizer()
    ids = {"pad_token_id": reader.pad_id, "eos_token_id": reader.eos_id, "decoder_start_token_id": 0}
    config = transformers.T5Config(**{"vocab_size": reader.vocab_size, **ids, **SHAPE, **settings})
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    reader.save(folder)
    return folder


def test_weights_that_are_no_t5_are_not_made_up(tmp_path, capfd):
    """transformers fills what lacks with random numbers."""
    whole, narrow = save_plain_t5(tmp_path / "whole"), save_plain_t5(tmp_path / "narrow", d_model=16)
    assert PruningAutoencoder.from_t5(whole, PruningConfig()).t5.config.d_model == 32
    with pytest.raises(PruningError, match="a checkpoint of t5 without pruning"):
        PruningAutoencoder.from_pretrained(whole)
    weights = load_file(whole / "model.safetensors")
    half = {name: tensor for name, tensor in weights.items() if not name.startswith("decoder")}
    capfd.readouterr()
    for found in (half, load_file(narrow / "model.safetensors")):
        save_file(found, whole / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(PruningError, match=r"do not fit the config: (missing )?decoder.* and \d+ more"):
            PruningAutoencoder.from_t5(whole, PruningConfig())
    assert capfd.readouterr().err == ""  # the error says it, without a table
    startless = save_plain_t5(tmp_path / "startless", decoder_start_token_id=None)
    with pytest.raises(PruningError, match="must name decoder_start_token_id"):
        PruningAutoencoder.from_t5(startless, PruningConfig())
    with pytest.raises(PruningError, match="no T5 with model.safetensors"):
        PruningAutoencoder.from_t5(tmp_path / "none", PruningConfig())
    with pytest.raises(PruningError, match="T5Config has no d_modell"):  # it takes any key
        PruningAutoencoder.from_scratch(PruningConfig(), tokenizer(), d_modell=16)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", b"[]", "holds no config.json of a trained model"),
        ("config.json", {"learnable_attention_pruning": {"beta": "x"}}, "beta: must be a finite number"),
        ("config.json", {"learnable_attention_pruning": {"zeta": 1}}, "zeta"),
        ("model.safetensors", b"garbage", "model.safetensors cannot be read"),
        ("model.safetensors", None, "no file named model.safetensors"),
        ("tokenizer.json", b"{}", "tokenizer.json: not a file of the library"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json: cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, content, words):
    model().save_pretrained(tmp_path)
    path = tmp_path / file
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    else:
        path.write_bytes(content)
    with pytest.raises(PruningError, match=words):
        PruningAutoencoder.from_pretrained(tmp_path)
