"""The suite loader: the grid, and a clear one-line error for every invalid file."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from acp_repro.common import files
from acp_repro.model import load_config
from acp_repro.papers.acp.task import FoXTask
from acp_repro.pipeline import freshness
from acp_repro.pipeline.errors import RecordError, SuiteError
from acp_repro.pipeline.records import read_records, write_records
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.suite import main as suite_main
from tests.suites import YAML, with_measure

ROOT = Path(__file__).parent.parent


def test_grid_defines_the_runs_and_pairs_differ_in_one_key(make_suite):
    suite = make_suite(YAML.replace("tokens: 1536", "tokens: 1.536e3"))
    acp, exact = suite.runs
    assert (acp.size.tokens, type(acp.size.tokens)) == (1536, int)  # an integer may have an exponent
    assert (acp.name, exact.name) == ("pro-tiny-128-acp", "pro-tiny-128-exact")
    before, after = acp.as_dict(), exact.as_dict()
    assert [key for key in before if before[key] != after[key]] == ["log_pruning_tolerance"]
    assert acp.model_config(257).num_heads == 2 and acp.model_config(257).qk_norm
    assert suite.select(acp=True) == [acp] and suite.select(architecture="llama") == []
    assert suite.pairs("pro") == suite.pairs("pro", largest=True) == [acp, exact]
    assert suite.pairs("pro", largest=False) == [] and suite.run_for_heads == suite.run_for_sweep == acp


def test_run_can_start_from_one_perturbed_weight(make_suite):
    suite = make_suite(YAML.replace("[-10, null]", "[null, -10], perturb_init: [false, true, 2]"))
    plain, perturbed, other, *pruned = suite.runs
    assert (perturbed.name, other.name) == ("pro-tiny-128-exact-nudged", "pro-tiny-128-exact-nudged2")
    assert all(map(suite.has_exact_pair, suite.runs)) and suite.pairs("pro") == [plain, pruned[0]]
    before = json.loads(json.dumps(plain.as_dict()))
    assert freshness.differences(before, perturbed) == ["perturb_init: False, now True"]
    assert suite.select(acp=False) == [plain] and plain.setting != perturbed.setting
    models = []
    for run in (plain, perturbed, other):
        torch.manual_seed(run.seed)
        models.append(torch.cat([p.detach().flatten() for p in FoXTask(run).build().parameters()]))
    apart = [(model - models[0]).abs() for model in models[1:]]
    assert all((moved > 0).sum() == 1 and moved.max() < 2e-3 for moved in apart)
    assert apart[0].argmax() != apart[1].argmax()


def current(suite, *metrics):
    """The metrics of the first run with up-to-date results."""
    run = suite.runs[0]
    return {name for name in metrics if freshness.is_current(suite, run, suite.paper.metric(name))}


def record(suite, run, *metrics):
    """Writes results of a run, as if measured with the suite's settings."""
    for metric in map(suite.paper.metric, metrics):
        row = dict.fromkeys(metric.columns, 1)
        write_records(suite, run, metric, [row], device="a", dtype="float32", trained_tokens=1)


@pytest.mark.parametrize("text", ['{"records": []}', '{"records": {"loss.csv": [1]}}', '{"trained": [1]}'])
def test_settings_of_another_shape_are_reported_in_one_line(make_suite, text):
    suite = make_suite(YAML)
    record(suite, suite.runs[0], "loss")
    path = freshness.settings_path(suite.runs[0])
    path.write_text(text)
    with pytest.raises(RecordError, match=f"^{path} is damaged; restore it, or delete it to measure"):
        current(suite, "loss")


def test_results_belong_to_the_present_weights(make_suite):
    suite = make_suite(YAML)
    run = suite.runs[0]
    done = run.folder / "done.json"
    files.write_json(done, {"sha256": "a", "gpu_seconds": 1.0})
    names = ("loss", "decay")
    record(suite, run, *names)
    assert current(suite, *names) == set(names)
    files.write_json(done, {"sha256": "b", "gpu_seconds": 1.0})
    assert current(suite, *names) == set()
    of_shape = dataclasses.replace(suite.paper.metric("loss"), untrained=lambda run: True)
    assert freshness.is_current(suite, run, of_shape)
    record(suite, run, "loss")
    assert current(suite, *names) == {"loss"}  # decay belongs to the first weights
    record(suite, run, "decay")
    done.unlink()
    assert current(suite, *names) == set(names)  # deleted weights do not count
    freshness.settings_path(run).unlink()
    assert current(suite, *names) == set()  # without settings, nothing is known


@pytest.mark.parametrize(("items", "current"), [(None, True), (5, False)])
def test_new_key_invalidates_older_results_unless_it_has_its_default(make_suite, items, current):
    """Results from before a setting existed are valid for its default and for no other value."""
    suite = make_suite()
    run, metric = suite.runs[0], suite.paper.metric("loss")
    record(suite, run, "loss")
    recorded = json.loads(freshness.settings_path(run).read_text())
    del recorded["measure"]["lm_eval_items"]
    recorded["measure"]["a_key_that_became_a_constant"] = 3
    files.write_json(freshness.settings_path(run), recorded | {"records": {}})
    record(with_measure(suite, lm_eval_items=None), run, "loss")  # as measured before the key existed
    assert "lm_eval_items" not in freshness.recorded_settings(run)["measure"]
    later = with_measure(suite, lm_eval_items=items)
    assert freshness.is_current(later, run, metric) == current
    record(later, run, "decay")
    assert freshness.is_current(later, run, metric) == current
    # Another value of an existing key is another setting.
    other = with_measure(later, lm_eval_items=6)
    assert not freshness.is_current(other, run, metric)


def test_size_can_override_gpu_settings(make_suite):
    suite = make_suite(
        YAML.replace(
            "learning_rate: 1e-2",
            "learning_rate: 1e-2, micro_batch_tokens: 256, gradient_checkpointing: true",
        )
    )
    run = suite.runs[0]
    assert (run.training.micro_batch_tokens, run.training.gradient_checkpointing) == (256, True)
    moved = YAML.replace("micro_batch_tokens: 128", "micro_batch_tokens: 256, gradient_checkpointing: true")
    assert run.as_dict() == make_suite(moved).runs[0].as_dict()  # the same run, wherever the keys are


def test_paper_suite_has_36_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    suite = load_suite("paper")
    names = {
        f"{architecture}-{size}-{length}k-{method}"
        for architecture in ("pro", "llama")
        for size in ("125m", "360m", "760m")
        for length in (4, 8, 16)
        for method in ("acp", "exact")
    }
    assert len(suite.runs) == 36 and {run.name for run in suite.runs} == names
    assert suite.pairs("pro") + suite.pairs("llama") == list(suite.runs)
    # Training settings of the paper that differ from the defaults.
    micro = {run.size_name: run.training.micro_batch_tokens for run in suite.runs}
    assert micro == {"125M": 32_768, "360M": 16_384, "760M": 16_384}
    assert suite_main(["paper", "--names"]) == 0
    assert capsys.readouterr().out.split() == [run.name for run in suite.runs]


def test_pretrained_suite_matches_its_trainer(monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = load_suite("pretrained").runs
    assert runs
    for run in runs:
        trained = load_suite(run.weights.trained_by).run(run.name)
        assert run.model_config(4096) == trained.model_config(trained.data.vocab_size)
        assert run.model_config(4096) == load_config(run.model_folder)
        assert run.size.tokens == trained.size.tokens
        assert run.data.tokenizer_file == str(run.model_folder / "tokenizer.json")
        assert run.command == trained.command
        assert "weights" not in run.as_dict()


def test_run_names_state_length_tolerance_and_seed(make_suite):
    text = YAML.replace("context_length: [128]", "context_length: [1024], seed: [0, 3]")
    text = text.replace("[-10, null]", "[-10, -2.5, null]").replace(
        "micro_batch_tokens: 128", "micro_batch_tokens: 1024"
    )
    text = text.replace("batch_tokens: 256", "batch_tokens: 2048")
    assert [run.name for run in make_suite(text).runs] == [
        "pro-tiny-1k-acp",
        "pro-tiny-1k-acp-seed3",
        "pro-tiny-1k-acp2.5",
        "pro-tiny-1k-acp2.5-seed3",
        "pro-tiny-1k-exact",
        "pro-tiny-1k-exact-seed3",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden_size: 32", "hiden_size: 32", r"tiny.hiden_size: unknown key; did you mean hidden_size"),
        ("hidden_size: 32", "hidden_size: wide", "tiny.hidden_size: must be a valid integer, got .wide.$"),
        ("hidden_size: 32", "hidden_size: 40", "tiny.head_dim: 16 must divide hidden_size 40"),
        ("hidden_size: 32, ", "", "sizes.tiny.hidden_size: missing"),
        ("tokens: 1536", "tokens: -1", "sizes.tiny.tokens: must be a whole number of at least 1, got -1"),
        ("tokens: 1536", "tokens: 1.5e-1", "sizes.tiny.tokens: must be a valid integer, got 0.15"),
        ("loss_tokens: 256", "lm_eval_tasks: [piqaa]", r"lm_eval_tasks\[0\]: .*; did you mean piqa"),
        ("size: [tiny]", "size: [huge]", r"grid\[0\].size: no size 'huge' under sizes, which has tiny"),
        ("size: [tiny]", "size: tiny", r"grid\[0\].size: must be a valid array, got 'tiny'"),
        ("warmup_tokens: 512", "warmup_tokens: 1537", "training.warmup_tokens: 1537 are more than the 1536"),
        (
            "1e-2",
            "1e-2, micro_batch_tokens: 96",
            "sizes.tiny.micro_batch_tokens: 96 must divide batch_tokens",
        ),
        ("1e-2", "1e-2, micro_batch_tokens: 64", "sizes.tiny.micro_batch_tokens: 64 must be a multiple"),
        ("[128]", "[100]", "micro_batch_tokens: 128 must be a multiple of the context length 100"),
        ("[-10, null]", "[-10, -10]", "must be a list of different values"),
        ("corpus: text", "corpus: web", "data.corpus"),
        ("grid:", "weights: x\ngrid:", "weights: must be an object, got .x."),
        ("description: a test", "description: a test\ndescription: twice", "'description' is given twice"),
        ("description: a test", "description: [", "not valid YAML"),
        ("description: a test", f"description: {'[' * 400}{']' * 400}", "not valid YAML"),
        ("description: a test", "description: &all [*all]", "write it out instead of an alias"),
        ("grid:", "grid:\n  - {size: [tiny], context_length: [128]}", "makes the run .* a second time"),
        ("[-10, null]", f"[-10, null], seed: {list(range(600))}", "grid: makes 1,200 runs; at most 1,000"),
        ("grid:", "skip_runs: ['*']\ngrid:", "grid: has no run but those of skip_runs; add one"),
        (
            "dtype: float32",
            "dtype: float23",
            "dtype: must be .bfloat16. or .float32., .*; did you mean float32",
        ),
        ("loss_tokens: 256", "needle_depths: [2]", r"needle_depths\[0\]: must be a number in \[0, 1\]"),
        ("[-10, null]", "[-10], needle_fraction: [2]", r"needle_fraction\[0\]: must be a number in \[0, 1\]"),
        ("dtype: float32", "dtype: float32, context_parallel: 4", "multiple of 512, two chunks .* not 128"),
    ],
)
def test_suite_errors_name_file_and_key_in_one_line(make_suite, old, new, message):
    assert old in YAML
    with pytest.raises(SuiteError, match=message) as caught:
        make_suite(YAML.replace(old, new, 1))
    assert str(caught.value).startswith("experiments/mini.yaml: ") and "\n" not in str(caught.value)


def test_external_suite_file_is_requested_by_path_and_named_by_stem(make_suite, tmp_path):
    make_suite(YAML)
    elsewhere = tmp_path / "my suites"
    elsewhere.mkdir()
    (file := elsewhere / "mine.yaml").write_text(YAML)
    suite = load_suite(str(file))
    run, metric = suite.runs[0], suite.paper.metric("loss")
    assert (suite.name, run.folder) == ("mine", Path("runs/mine") / run.name)
    assert json.loads(json.dumps(run.as_dict()))["suite"] == "mine"
    option = f"--suite '{file}' --run {run.name}"  # quoted for a shell
    assert run.command.endswith(option) and metric.command_for(suite.name, [run]).endswith(option)
    with pytest.raises(RecordError, match=f"measure loss --suite '{file}'"):
        read_records(suite, "loss")
    assert load_suite("experiments/mini.yaml").runs[0].command.endswith(f"--suite mini --run {run.name}")
