"""Data settings: the valid keys and values of a suite file, and their errors."""

import dataclasses
import json
from pathlib import Path

import pytest

from acp_repro.pipeline.data import DataConfig
from acp_repro.pipeline.errors import SuiteError
from acp_repro.pipeline.strict_yaml import build


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokeniser": "bytes"}, "tokeniser: unknown key; did you mean tokenizer"),
        ({"corpus": "novels"}, "corpus: 'novels' is not known; use stdlib, text, file, hf, .* qasper$"),
        ({"corpus": "cuad", "path": "x", "options": {"lest": 2}}, "options.lest: unknown; .* are least"),
        ({"corpus": "facts", "options": {"examples": "many"}}, "options.examples: 'many' is not a number"),
        ({"text_field": "body"}, "text_field: only `corpus: text or file or hf`"),
        ({"corpus": "text"}, "path: None, but `corpus: text` needs the path of a file or a folder"),
        ({"path": "x"}, "path: `corpus: stdlib` accepts no path"),
        ({"corpus": "text", "path": []}, "path: must be .*a non-empty list of paths"),
        ({"corpus": "file", "path": ["a", "b"]}, "path: .* accepts one path"),
        ({"heldout": 1}, r"heldout: must be a number in \[0, 1\)"),
        ({"heldout": "x"}, "heldout: `corpus: stdlib` accepts a fraction such as 0.05, not paths"),
        ({"tokenizer": "gpt3"}, "tokenizer: must be bytes, gpt2, {bpe: 258 or more} or {file: PATH}"),
        ({"tokenizer": {"bpe": 257}}, "tokenizer: must be .*258"),
        ({"tokenizer": {"bpe": 4096, "x": 1}}, "tokenizer: must be"),
        ({"corpus": "longcrawl64", "path": "x", "heldout": 0.1}, "heldout: .* heldout.zarr; remove"),
        ({"corpus": "longcrawl64", "path": "x", "tokenizer": "bytes"}, "tokenizer: .* consists of GPT-2 ids"),
        ({"corpus": "hf", "path": "a/b"}, "max_documents: missing; .* such as 10_000"),
    ],
)
def test_suite_file_error_is_reported_in_one_line(settings, message):
    with pytest.raises(SuiteError, match=f"^a.yaml: {message}"):
        build(DataConfig, settings, Path("a.yaml"))


def test_settings_round_trip():
    """Round trip as in ``run.json``."""
    config = DataConfig()
    assert config == DataConfig("stdlib", None, "text", 0.05, "bytes") and config.options == {}
    paper = DataConfig("longcrawl64", "x")
    assert (paper.tokenizer, paper.heldout, paper.vocab_size) == ("gpt2", None, 50257)
    paths = DataConfig("text", ["x", "y"], heldout=["a", "b"], tokenizer={"bpe": 4096})
    assert paths.heldout == paths.heldout_paths == ("a", "b") and paths.vocab_size == 4096
    for one in (config, paper, paths, DataConfig("hf", "a/b", max_documents=3)):
        content = json.loads(json.dumps(dataclasses.asdict(one)))
        assert DataConfig(**content) == build(DataConfig, content, Path("a.yaml")) == one
    assert DataConfig("text", "x", heldout="a").heldout_paths == ("a",)
