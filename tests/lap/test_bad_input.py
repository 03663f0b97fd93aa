"""Texts, settings and folders that cannot be: each is one error in words."""

import json

import pytest
from safetensors.torch import load_file, save_file

from acp_repro.lap import PruningAutoencoder, PruningConfig, PruningError
from tests.lap.tiny import SHAPE, TEXTS, model, tokenizer, transformers


def test_bad_input_is_refused_in_words(tmp_path):
    built = model(max_length=8)
    with pytest.raises(PruningError, match="text 2 of 2 is empty"):
        built.encode(["a cat", ""])
    with pytest.raises(
        PruningError, match=r"text 1 of 1 has \d+ tokens with its EOS, and the model's maximum is 8"
    ):
        built.encode([TEXTS[2]])
    with pytest.raises(PruningError, match="give a list of texts"):
        built.encode("a cat")
    with pytest.raises(PruningError, match="at least one"):
        built.encode([])
    with pytest.raises(PruningError, match="holds no config.json"):
        PruningAutoencoder.from_pretrained(tmp_path)
    built.t5.save_pretrained(tmp_path)
    with pytest.raises(PruningError, match="a checkpoint of t5 without pruning"):
        PruningAutoencoder.from_pretrained(tmp_path)
    with pytest.raises(PruningError, match="no T5 with model.safetensors"):
        PruningAutoencoder.from_t5(tmp_path / "none", PruningConfig())
    built.save_pretrained(tmp_path / "wide")
    model(shape={"d_model": 16, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 3}).save_pretrained(
        tmp_path / "narrow"
    )
    (tmp_path / "wide/model.safetensors").write_bytes((tmp_path / "narrow/model.safetensors").read_bytes())
    with pytest.raises(PruningError, match="model.safetensors does not fit config.json"):
        PruningAutoencoder.from_pretrained(tmp_path / "wide")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "text 2 of 2 must be a string, got NoneType"),
        (b"a cat", "text 2 of 2 must be a string, got bytes"),
        ("a \udcff", "text 2 of 2 has no character at place 3, but a stray byte"),
    ],
)
def test_what_is_no_text_is_refused(text, words):
    with pytest.raises(PruningError, match=words):
        model().encode(["a cat", text])


def test_a_text_without_eos_is_refused():
    """Of one whose gates all close nothing would be left."""
    built = model(beta=-1e4)
    ids = built.token_ids(TEXTS)
    ids[1, ids[1] == built.t5.config.eos_token_id] = 5
    with pytest.raises(PruningError, match=f"has no EOS, id {built.t5.config.eos_token_id}"):
        built.encode_ids(ids)


def plain_t5(folder, **settings):
    """A folder of a T5 without gates, with the tokeniser of the tests."""
    reader = tokenizer()
    ids = {"pad_token_id": reader.pad_id, "eos_token_id": reader.eos_id, "decoder_start_token_id": 0}
    config = transformers.T5Config(**{"vocab_size": reader.vocab_size, **ids, **SHAPE, **settings})
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    reader.save(folder)
    return folder


def test_weights_that_are_no_t5_are_not_made_up(tmp_path, capfd):
    """transformers fills what lacks with random numbers."""
    whole = plain_t5(tmp_path / "whole")
    assert PruningAutoencoder.from_t5(whole, PruningConfig()).t5.config.d_model == 32
    weights = load_file(whole / "model.safetensors")
    half = {name: tensor for name, tensor in weights.items() if not name.startswith("decoder")}
    save_file(half, whole / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PruningError, match="not the weights of a T5, these lack or do not fit: decoder"):
        PruningAutoencoder.from_t5(whole, PruningConfig())
    wide, narrow = plain_t5(tmp_path / "wide"), plain_t5(tmp_path / "narrow", d_model=16)
    (wide / "model.safetensors").write_bytes((narrow / "model.safetensors").read_bytes())
    capfd.readouterr()
    with pytest.raises(PruningError, match=r"not the weights of a T5.* and \d+ more"):
        PruningAutoencoder.from_t5(wide, PruningConfig())
    assert capfd.readouterr().err == ""  # the error says it, without a table
    with pytest.raises(PruningError, match="must name decoder_start_token_id"):
        PruningAutoencoder.from_t5(
            plain_t5(tmp_path / "startless", decoder_start_token_id=None), PruningConfig()
        )


def test_a_shape_that_t5_does_not_know_is_refused():
    """T5Config takes any key and goes on with its own."""
    with pytest.raises(PruningError, match="T5Config has no d_modell"):
        PruningAutoencoder.from_scratch(PruningConfig(), tokenizer(), d_modell=16)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"[]", "config.json: not the settings of a model"),
        ("config.json", {"learnable_attention_pruning": 3}, "pruning settings of another version: 3"),
        (
            "config.json",
            {"learnable_attention_pruning": {"beta": "x"}},
            "config.json: beta: must be a finite number",
        ),
        ("config.json", {"learnable_attention_pruning": {"zeta": 1}}, "another version: unknown zeta"),
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
