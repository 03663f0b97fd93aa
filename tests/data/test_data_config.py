"""Settings: each key checked, with one line that names it."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from acp_repro.pipeline.data import DataConfig, DataError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["stdlib"], r"data: \['stdlib'\] is not a mapping; write `corpus: stdlib`"),
        ({"tokeniser": "bytes"}, "tokeniser: unknown key; did you mean tokenizer.*keys are corpus"),
        ({"xyz": 1}, r"xyz: unknown key \(the keys are corpus"),
        ({"corpus": "novels"}, "corpus: 'novels' is not known; use stdlib, text, file, hf, .* or qasper$"),
        (
            {"corpus": "cuad", "path": "x", "options": {"lest": 2}},
            "options.lest: unknown; the options of `corpus: cuad` are least",
        ),
        ({"text_field": "body"}, "text_field: is for `corpus: text or file or hf`; remove it, or set"),
        ({"corpus": "text"}, "path: None, but `corpus: text` needs the path of a file or a folder"),
        ({"corpus": "text", "path": 3}, "path: 3, but `corpus: text` needs"),
        ({"path": "x"}, "path: `corpus: stdlib` takes none; remove it, or set corpus: text"),
        ({"text_field": ""}, "text_field: '' is not the name of a field"),
        ({"heldout": 1}, "heldout: 1 is not a share; use 0 to less than 1"),
        ({"heldout": -0.1}, "heldout: -0.1 is not a share"),
        ({"heldout": float("nan")}, "heldout: nan is not a share"),
        ({"heldout": True}, "heldout: True is neither a share such as 0.05 nor a path"),
        ({"heldout": "x"}, "heldout: `corpus: stdlib` takes a share such as 0.05, not paths"),
        ({"corpus": "text", "path": []}, "path: .* is not a list of paths"),
        ({"corpus": "hf", "path": ["a", "b"]}, "path: .* needs the name of a dataset"),
        ({"corpus": "text", "path": "x", "heldout": []}, "heldout: .* is not a list of paths"),
        ({"corpus": "text", "path": "x", "heldout": ["a", 1]}, "heldout: .* not a list of paths"),
        ({"tokenizer": "gpt3"}, r"'gpt3' is not known; use bytes, gpt2, \{bpe: 4096\} or \{file: PATH"),
        ({"tokenizer": "bpe"}, "tokenizer: 'bpe' is not known"),
        ({"tokenizer": ["bpe"]}, "tokenizer: .* is not known"),
        ({"tokenizer": {"file": 3}}, "tokenizer: file: 3 is not a path; name a tokenizer.json"),
        ({"corpus": "longcrawl64"}, "path: None, but .* needs the path of the folder with train.zarr"),
        ({"corpus": "longcrawl64", "path": "x", "heldout": 0.1}, "heldout: .* heldout.zarr; remove"),
        ({"corpus": "longcrawl64", "path": "x", "tokenizer": "bytes"}, "is GPT-2 ids; remove the key"),
        ({"corpus": "hf"}, "path: None, but `corpus: hf` needs the name of a dataset"),
        ({"corpus": "hf", "path": "a/b"}, "max_documents: None, but .* such as 10_000"),
        ({"corpus": "hf", "path": "a/b", "max_documents": 0}, "max_documents: 0, but"),
        ({"corpus": "hf", "path": "a/b", "max_documents": 9, "split": ""}, "split: '' is not a name"),
        ({"corpus": "hf", "path": "a/b", "max_documents": 9, "heldout": "x"}, "takes a share"),
        ({"max_documents": 9}, "max_documents: is for `corpus: hf`; remove it, or set corpus: hf"),
        ({"tokenizer": {"bpe": 4096, "x": 1}}, "tokenizer: .* is not known"),
        ({"tokenizer": {"bpe": "4096"}}, "tokenizer: bpe: '4096' is not a whole number"),
        ({"tokenizer": {"bpe": 1e3}}, "tokenizer: bpe: 1000.0 is not a whole number"),
        ({"tokenizer": {"bpe": True}}, "tokenizer: bpe: True is not a whole number"),
        ({"tokenizer": {"bpe": 257}}, "tokenizer: bpe: 257 ids are too few; use 258"),
    ],
)
def test_settings_errors(settings, message):
    with pytest.raises(DataError, match=message):
        DataConfig.from_dict(settings)


def test_settings_defaults():
    config = DataConfig.from_dict({})
    assert config == DataConfig("stdlib", None, "text", 0.05, "bytes") and config.options == {}
    assert DataConfig.from_dict(config) is config
    paper = DataConfig("longcrawl64", "x")
    assert (paper.tokenizer, paper.heldout, paper.vocab_size) == ("gpt2", None, 50257)
    for one in (config, paper, DataConfig("hf", "a/b", max_documents=3)):  # as a run's folder keeps it
        assert DataConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(one)))) == one
    paths = DataConfig("text", "x", heldout=["a", "b"])
    assert paths.heldout == paths.heldout_paths == ("a", "b")
    assert DataConfig("text", "x", heldout="a").heldout_paths == ("a",)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("path: a.txt is no file", "a.yaml: data.path: a.txt is no file"),
        ("options.least: 0 is too few", "a.yaml: data.options.least: 0 is too few"),
        ("exclude: no such file", "a.yaml: data.options.exclude: no such file"),  # an option without a key
        ("path.csv:3: not valid CSV", "a.yaml: data: path.csv:3: not valid CSV"),
    ],
)
def test_errors_of_a_corpus_begin_with_the_place_of_its_settings(error, said):
    with (
        pytest.raises(DataError, match=f"^{re.escape(said)}$"),
        DataConfig("text", "a.txt").errors_at("a.yaml: data"),
    ):
        raise DataError(error)


def test_settings_need_the_standard_library_only():
    code = (
        "import sys\n"
        "for name in ('numpy', 'torch', 'tqdm', 'tokenizers', 'yaml', 'fsspec', 'pydantic'):\n"
        "    sys.modules[name] = None\n"
        "from acp_repro.pipeline.data.config import DataConfig\n"
        "from acp_repro.pipeline.data import DataConfig as Same, DataError\n"
        "assert Same is DataConfig\n"
        "print(DataConfig('text', 'x', tokenizer={'bpe': 300}).vocab_size)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout == "300\n", done.stderr


def test_every_public_name_loads():
    import acp_repro.pipeline.data as package

    assert all(getattr(package, name).__name__ == name for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'Korpus'"):
        package.Korpus  # noqa: B018


def test_strict_types_of_the_fields():
    """What a suite file's loader checks by the annotations, elements of lists included."""
    pydantic = pytest.importorskip("pydantic", reason="pip install pydantic")
    adapter = pydantic.TypeAdapter(DataConfig)

    def read(settings):
        return adapter.validate_json(json.dumps(settings), strict=True)

    good = {"corpus": "text", "path": "x", "heldout": ["a", "b"], "tokenizer": {"bpe": 4096}}
    assert read(good) == DataConfig.from_dict(good) and read(good).heldout == ("a", "b")
    for settings in ({}, {"heldout": 0.1}, {"corpus": "text", "path": "x", "heldout": "a"}):
        assert read(settings) == DataConfig.from_dict(settings)
    for settings, place in [
        ({**good, "heldout": ["a", 1]}, ("heldout", "list[str]", 1)),
        ({"heldout": True}, ("heldout", "float")),
        ({"corpus": 3}, ("corpus",)),
        ({"xyz": 1}, ("xyz",)),
    ]:
        with pytest.raises(pydantic.ValidationError) as error:
            read(settings)
        assert place in [fault["loc"] for fault in error.value.errors()]
    assert not {"__pydantic_config__"} & {field.name for field in dataclasses.fields(DataConfig)}
