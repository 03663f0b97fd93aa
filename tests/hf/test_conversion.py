"""Format conversion preserves weights bitwise and the ids of tokenizers."""

import json
import shutil

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")

from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import acp_repro.hf
from acp_repro.convert import main
from acp_repro.hf.conversion import byte_characters
from acp_repro.hf.tokenization import escape, unescape
from acp_repro.model import BPETokenizer, ByteTokenizer, load_pretrained

from .tiny import saved

TEXT = 'It was "dark"\n\tand stormy; ½ of the rän fell — 雨 🦊 \\ /'


def same_bits(a, b):
    a, b = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert a.keys() == b.keys() != set()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def test_round_trip_conversion(small_fox, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    assert main([str(small_fox), str(there), "--to", "transformers"]) == 0
    assert main([str(there), str(back), "--to", "official"]) == 0
    same_bits(small_fox, there)
    same_bits(small_fox, back)
    assert load_pretrained(back).config == load_pretrained(small_fox).config
    model = AutoModelForCausalLM.from_pretrained(there)
    tokenizer = AutoTokenizer.from_pretrained(there)
    ours = BPETokenizer((small_fox / "tokenizer.json").read_text())
    assert tokenizer(TEXT)["input_ids"] == ours.prompt(TEXT)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"], skip_special_tokens=True) == TEXT
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == model.config.eos_token_id == ours.bos_id
    told = model.generation_config
    assert (told.bos_token_id, told.eos_token_id, told.pad_token_id) == (ours.bos_id,) * 3
    assert AutoConfig.from_pretrained(there).dtype == torch.bfloat16
    # The converted tokenizer is readable by this project, with BOS in the file.
    again = BPETokenizer((back / "tokenizer.json").read_text())
    assert (again.bos_id, again.vocab_size) == (ours.bos_id, ours.vocab_size)
    assert again.encode(TEXT).tolist() == ours.encode(TEXT).tolist()
    for folder in (small_fox, back):
        assert AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] == ours.prompt(TEXT)
    (back / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"back has no tokenizer\.json; copy the model's"):
        AutoTokenizer.from_pretrained(back)


def test_shards_are_joined(tmp_path):
    model = saved(tmp_path / "source")
    shards = tmp_path / "shards"
    AutoModelForCausalLM.from_pretrained(tmp_path / "source").save_pretrained(shards, max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert main([str(shards), str(tmp_path / "back"), "--to", "official"]) == 0
    same_bits(tmp_path / "source", tmp_path / "back")
    assert load_pretrained(tmp_path / "back").config == model.config


def test_byte_level_models(tmp_path):
    saved(tmp_path / "source", vocab_size=257)
    assert main([str(tmp_path / "source"), str(tmp_path / "out"), "--to", "transformers"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT)["input_ids"] == ByteTokenizer().prompt(TEXT)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"], skip_special_tokens=True) == TEXT
    assert tokenizer.eos_token_id == ByteTokenizer.bos_id


def test_json_tokenizer_of_longcrawl64(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    saved(source, vocab_size=50257, hidden_size=32, num_heads=2, num_hidden_layers=1)
    # A vocabulary of GPT-2's size whose only real tokens are the bytes.
    characters = byte_characters()
    vocabulary = {characters[byte]: byte for byte in range(256)}
    vocabulary |= {f"\ue000{n}": n for n in range(256, 50256)} | {"<|endoftext|>": 50256}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.save(str(source / "tokenizer.json"))
    assert main([str(source), str(out), "--to", "transformers", "--longcrawl64"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert isinstance(tokenizer, acp_repro.hf.JSONGPT2Tokenizer)
    escaped = json.dumps(TEXT)[1:-1]
    assert tokenizer(TEXT)["input_ids"] == [50256, *escaped.encode()]
    assert tokenizer([TEXT, "a"])["input_ids"] == [[50256, *escaped.encode()], [50256, 97]]
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == list(escaped.encode())
    pair = tokenizer(TEXT, "\n", add_special_tokens=False)["input_ids"]
    assert pair == [*escaped.encode(), *rb"\n"]
    assert tokenizer.decode(list(escaped.encode())) == TEXT
    assert tokenizer(TEXT + tokenizer.eos_token)["input_ids"][-1] == 50256 == tokenizer.eos_token_id
    assert AutoModelForCausalLM.from_pretrained(out).config.eos_token_id == 50256


def test_tokenizer_that_does_not_fit_the_model_is_rejected(small_fox, tmp_path, capsys):
    """One of 4,096 ids is not GPT-2's, and a model with a vocabulary of 97 cannot read its ids."""
    assert main([str(small_fox), str(tmp_path / "out"), "--to", "transformers", "--longcrawl64"]) == 2
    assert "this tokenizer has 4096 ids, but GPT-2's" in capsys.readouterr().err
    saved(tmp_path / "source")
    shutil.copy(small_fox / "tokenizer.json", tmp_path / "source")
    assert main([str(tmp_path / "source"), str(tmp_path / "other"), "--to", "transformers"]) == 2
    assert "has 4096 ids, but the model has 97" in capsys.readouterr().err


def test_json_escapes():
    for text in (TEXT, "", "\\n", "\\\\n", "\u2028", "😀" * 3):
        assert unescape(escape(text)) == text
    assert unescape("half\\") == "half\\" and unescape("\\u00") == "\\u00"
    assert unescape("\\ud83e") == "\N{REPLACEMENT CHARACTER}"
