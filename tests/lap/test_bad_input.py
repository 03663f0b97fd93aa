"""Invalid texts and folders: each raises one error that names the cause."""

import json

import pytest
import transformers
from safetensors.torch import load_file, save_file

from acp_repro.common.errors import UsageError
from acp_repro.lap import PruningAutoencoder, PruningConfig, PruningError
from tests.lap.tiny import SHAPE, TEXTS, model, tokenizer


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a cat", ""], "text 2 of 2 is empty"),
        ([TEXTS[2]], r"text 1 of 1 has \d+ tokens with its EOS, and the model's maximum is 8"),
        ("a cat", "give a list of at least one text"),
        (["a cat", "a \udcff"], "text 2 of 2 has a lone surrogate at character 3"),
        (["a cat", None], "at least one text, each a str"),
    ],
)
def test_non_text_input_is_rejected(texts, words):
    with pytest.raises(PruningError, match=words):
        model(max_length=8).encode(texts)


def test_text_without_eos_is_rejected():
    """A text whose gates all close would be empty."""
    built = model(beta=-1e4)
    ids = built.token_ids(TEXTS)
    ids[1, ids[1] == built.t5.config.eos_token_id] = 5
    with pytest.raises(PruningError, match=f"has no EOS .id {built.t5.config.eos_token_id}"):
        built.encode_ids(ids)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A folder of a T5 without gates, with the tokenizer of the tests."""
    folder, reader = tmp_path_factory.mktemp("t5"), tokenizer()
    ids = {"pad_token_id": reader.pad_id, "eos_token_id": reader.eos_id, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=reader.vocab_size, **ids, **SHAPE)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    reader.save(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 100}, "the tokenizer has .* ids"),
        ({"pad_token_id": 0}, "use the tokenizer of its training"),
        ({"eos_token_id": 1}, "use the tokenizer of its training"),
        ({"decoder_start_token_id": None}, "config.json has no decoder_start_token_id"),
    ],
)
def test_t5_with_another_tokenizer_is_rejected(t5, changes, words):
    config = transformers.T5Config.from_pretrained(t5)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(PruningError, match=words):
        PruningAutoencoder(transformers.T5ForConditionalGeneration(config), PruningConfig(), tokenizer())


def test_missing_t5_weights_are_not_initialised_at_random(t5, tmp_path):
    """transformers initialises missing weights at random, and T5's config accepts any key."""
    with pytest.raises(PruningError, match="config.json has no key"):
        PruningAutoencoder.from_pretrained(t5)
    with pytest.raises(PruningError, match="T5Config has no key d_modell"):
        PruningAutoencoder.from_scratch(PruningConfig(), tokenizer(), d_modell=16)
    weights = load_file(t5 / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((t5 / name).read_bytes())
    half = {name: tensor for name, tensor in weights.items() if not name.startswith("decoder")}
    save_file(half, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"do not fit the config: missing decoder.* and \d+ more"):
        PruningAutoencoder.from_t5(tmp_path, PruningConfig())


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", b"[]", "config.json has no key"),
        ("config.json", {"learnable_attention_pruning": {"beta": "x"}}, "beta: must be a finite number"),
        ("config.json", {"learnable_attention_pruning": {"zeta": 1}}, "zeta"),
        ("model.safetensors", b"garbage", "model.safetensors cannot be read"),
        ("tokenizer.json", b"{}", "tokenizer.json: not a file of the library"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json: cannot be read"),
    ],
)
def test_damaged_files_are_reported(tmp_path, file, content, words):
    model().save_pretrained(tmp_path)
    path = tmp_path / file
    if isinstance(content, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    else:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        PruningAutoencoder.from_pretrained(tmp_path)
