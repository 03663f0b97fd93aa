# ruff: noqa: E501
"""The suite loader: the grid, and one clear line for everything that can be wrong in a file."""

import dataclasses

import pytest

from acp_repro.make_rules import make_rules, write_stamps
from acp_repro.suite import SuiteError, load_suite
from tests.suites import YAML, write_suite


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load_text(text):
        write_suite(tmp_path, text)
        return load_suite("mini")

    return load_text


def test_the_grid_makes_the_runs_and_twins_differ_in_one_key(load):
    suite = load(YAML)
    acp, exact = suite.runs
    assert (acp.name, exact.name) == ("pro-tiny-128-acp", "pro-tiny-128-exact")
    before, after = acp.as_dict(), exact.as_dict()
    assert [key for key in before if before[key] != after[key]] == ["log_pruning_tolerance"]
    assert acp.model_config(257).num_heads == 2 and acp.model_config(257).qk_norm
    assert suite.select(acp=True) == [acp] and suite.select(architecture="llama") == []
    rules = make_rules(suite).splitlines()
    assert rules[0] == "RUNS_ACP_PRO := pro-tiny-128-acp"
    assert "TWINS_PRO_LARGEST := pro-tiny-128-acp pro-tiny-128-exact" in rules
    assert suite.twins("pro") == [acp, exact] and suite.heads_run == suite.sweep_run == acp


def test_stamps_change_only_with_their_own_settings(load, tmp_path):
    folder = tmp_path / "stamps"
    write_stamps(load(YAML), folder, since=1000.0)
    assert {p.stat().st_mtime for p in folder.iterdir()} == {1000.0}
    assert {p.stem for p in folder.iterdir()} == {
        "pro-tiny-128-acp",
        "pro-tiny-128-exact",
        "measure",
    }
    more = YAML.replace("[-10, null]", "[-10, -5, null]").replace(
        "timing_repeats: 1", "timing_repeats: 2"
    )
    write_stamps(load(more + "# a comment\n"), folder, since=1000.0)
    changed = {p.stem for p in folder.iterdir() if p.stat().st_mtime != 1000.0}
    assert changed == {"measure"} and (folder / "pro-tiny-128-acp5.json").exists()


def test_names_tell_length_tolerance_and_seed(load):
    text = YAML.replace("context_length: [128]", "context_length: [1024], seed: [0, 3]")
    text = text.replace("[-10, null]", "[-10, -2.5, null]").replace(
        "micro_batch_tokens: 128", "micro_batch_tokens: 1024"
    )
    text = text.replace("batch_tokens: 256", "batch_tokens: 2048")
    assert [run.name for run in load(text).runs] == [
        "pro-tiny-1k-acp", "pro-tiny-1k-acp-seed3", "pro-tiny-1k-acp2.5",
        "pro-tiny-1k-acp2.5-seed3", "pro-tiny-1k-exact", "pro-tiny-1k-exact-seed3",
    ]  # fmt: skip


def test_every_suite_of_the_project_loads():
    from pathlib import Path

    root = Path(__file__).parent.parent
    for path in (root / "experiments").glob("*.yaml"):
        suite = load_suite(str(path))
        assert suite.name == path.stem and suite.runs


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden_size: 32", "hiden_size: 32", r"sizes.tiny.hiden_size: unknown key; did you mean hidden_size\?"),
        ("measure:", "measures:", "measures: unknown key; did you mean measure?"),
        ("hidden_size: 32", "hidden_size: wide", r"sizes.tiny.hidden_size: must be int, got 'wide' \(str\)"),
        ("hidden_size: 32", "hidden_size: 40", "sizes.tiny.hidden_size: 40 must be a multiple of head_dim 16"),
        ("hidden_size: 32, ", "", "sizes.tiny.hidden_size: missing"),
        ("tokens: 1536", "tokens: -1", "sizes.tiny.tokens: must be positive, got -1"),
        ("tokens: 1536", "tokens: true", "sizes.tiny.tokens: must be int, got True"),
        ("learning_rate: 1e-2", "learning_rate: fast", "learning_rate: must be float"),
        ("size: [tiny]", "size: [huge]", r"grid\[0\].size: no size 'huge' under sizes, which has tiny"),
        ("size: [tiny]", "size: tiny", r"grid\[0\].size: must be list"),
        ("[128]", "[100]", "micro_batch_tokens: 128 must be a multiple of the context length 100"),
        ("[-10, null]", "[10]", r"grid\[0\].log_pruning_tolerance: is log\(epsilon\), negative"),
        ("[-10, null]", "[-10, -10]", "must be a list of different values"),
        ("[-10, null]", "[-10], architecture: [gpt]", "architecture: must be pro or llama, got 'gpt'"),
        ("micro_batch_tokens: 128", "micro_batch_tokens: 96", "micro_batch_tokens: 96 must divide batch_tokens 256"),
        ("dtype: float32", "dtype: float8", "training.dtype: must be bfloat16 or float32"),
        ("corpus: text", "corpus: web", "data.corpus"),
        ("corpus: text", "corpus: text, corps: x", "data.corps: unknown key; did you mean corpus?"),
        ("description: a test", "description: a test\ndescription: twice", "'description' is given twice"),
        ("description: a test", "description: [", "not valid YAML"),
        ("grid:", "grid:\n  - {size: [tiny], context_length: [128]}", "makes the run pro-tiny-128-acp a second time"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_file_and_key(load, old, new, message):
    assert old in YAML
    with pytest.raises(SuiteError, match=message) as caught:
        load(YAML.replace(old, new, 1))
    assert str(caught.value).startswith("experiments/mini.yaml: ") and "\n" not in str(caught.value)


def test_unknown_suites_and_runs_are_answered_with_what_there_is(load):
    suite = load(YAML)
    with pytest.raises(SuiteError, match="no such suite; there are mini"):
        load_suite("cpuu")
    with pytest.raises(SuiteError, match="did you mean pro-tiny-128-acp?"):
        suite.run("pro-tiny-128-apc")
    assert dataclasses.is_dataclass(suite)
