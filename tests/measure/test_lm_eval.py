"""Downstream tasks: scores match the model, tasks are converted to the Hub format, and runs resume."""

import json
import math

import pytest
import torch

from acp_repro.common.errors import UserError
from acp_repro.model import ByteTokenizer, FoXConfig, FoXForCausalLM
from acp_repro.pipeline.errors import UnknownName
from acp_repro.pipeline.evaluation.catalogue import PAPER_TASKS
from acp_repro.pipeline.evaluation.local_files import TaskData, check_files, read_documents

ITEMS = {
    "lm_eval/lambada_openai.jsonl": [
        {"context": f"The {a} saw the {b}, and {c} the", "continuation": a}
        for a, b, c in [("fox", "dog", "so did"), ("hen", "cow", "they met"), ("owl", "cat", "it fled")]
    ],
    "lm_eval/piqa.jsonl": [
        {"query": f"Question: How do I {what}?\n", "choices": ["with a long stick", "by night"], "gold": gold}
        for what, gold in (("swim", 0), ("read a map", 1), ("open it", 1))
    ],
    "lm_eval/winogrande.jsonl": [
        {
            "context_options": ["The fox saw the dog, so the fox", "The fox saw the dog, so the dog"],
            "continuation": f"was {how}.",
            "gold": gold,
        }
        for how, gold in (("seen", 1), ("the seer", 0))
    ],
    "lm_eval/arc_easy.jsonl": [
        {"query": "Question: What is red?", "choices": ["a rose", "snow", "the sea"], "gold": 0},
        {"query": "Question: What is wet?", "choices": ["sand", "rain"], "gold": 1},
    ],
    "lm_eval/arc_challenge.jsonl": [
        {"query": "Question: Why?", "choices": ["because", "so that", "who knows", "never"], "gold": 2}
    ]
    * 2,
    "lm_eval/copa.jsonl": [
        {"query": "He fell, because", "choices": ["he slept.", "it was icy."], "gold": 1},
        {"query": "It rained, and hailed, therefore", "choices": ["I ran.", "the sun shone."], "gold": 0},
    ],
    "lm_eval/openbook_qa.jsonl": [
        {"query": "Foxes eat", "choices": ["stones", "hens", "rain", "books"], "gold": 1}
    ]
    * 3,
    "lm_eval/boolq.jsonl": [
        {
            "query": f"Passage: A fox is an animal.\nQuestion: is a fox a {what}?",
            "choices": ["no", "yes"],
            "gold": gold,
        }
        for what, gold in (("stone", 0), ("beast", 1), ("plant", 0))
    ],
    "sciq/sciq_test.jsonl": [{"question": "What eats hens?", "answer": "foxes"}],
}
HELLASWAG = """Roof repair: A man is on a roof. he
3
sleeps.
sings a song.
runs.
takes off old tiles.
Health: How to rest. Lie down. Close your eyes.
0
Then sleep.
Then run.
Shout.
Eat two stones.
"""
WIKITEXT = (
    " \n = Fox = \n \n A fox @-@ like beast , seen in 1990 . \n = = Food = = \n It eats hens . \n"
    " \n = Hen = \n \n A hen is eaten ( sometimes ) by foxes . \n"
)


@pytest.fixture
def data(tmp_path):
    """A folder of task data in the layout of ``local_files``, with a few items per task."""
    folder = tmp_path / "data"
    for name, items in ITEMS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    for name, text in (
        ("hellaswag/hellaswag_val_full.txt", HELLASWAG),
        ("wikitext2/wiki.test.raw", WIKITEXT),
    ):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text, encoding="utf-8")
    return folder


# --- local files: no library needed ------------------------------------------------------------------


def test_local_files_are_converted_to_hub_columns(data):
    first = {task: read_documents(task, data)[0] for task in PAPER_TASKS if task != "sciq"}
    assert first["piqa"]["goal"] == "How do I swim?" and first["piqa"]["label"] == 0
    assert first["arc_easy"]["question"] == "What is red?" and first["arc_easy"]["answerKey"] == "0"
    labels = {"copa": 1, "boolq": 0, "hellaswag": "3"}  # their texts: see the prompts below
    assert {task: first[task]["label"] for task in labels} == labels
    pages = [document["page"] for document in read_documents("wikitext", data)]
    assert len(pages) == 2 and "= = Food = =" in pages[0] and pages[1].startswith(" = Hen = ")


@pytest.mark.parametrize(
    ("task", "file", "text", "words"),
    [
        ("piqa", "lm_eval/piqa.jsonl", "{\n", r"piqa\.jsonl: not the items of piqa"),
        ("piqa", "lm_eval/piqa.jsonl", "", r"piqa\.jsonl: contains no item of piqa"),
        ("piqa", "lm_eval/piqa.jsonl", '{"query": "Q"}\n', r"piqa\.jsonl: not the items of piqa"),
        (
            "piqa",
            "lm_eval/piqa.jsonl",
            '{"query": "Question: a\\n", "choices": ["a", "b"], "gold": 2}\n',
            "not the items",
        ),
        ("piqa", "lm_eval/piqa.jsonl", '{"query": "a", "choices": ["a", "b"], "gold": 1}\n', "not the items"),
        (
            "wikitext",
            "wikitext2/wiki.test.raw",
            "<html>404</html>\n",
            "precedes the heading of the first article",
        ),
    ],
)
def test_damaged_file_is_named_in_one_line(data, task, file, text, words):
    (data / file).write_text(text)
    with pytest.raises(TaskData, match=words) as caught:
        read_documents(task, data)
    assert "\n" not in str(caught.value)


def test_lines_end_at_json_line_separators(data):
    """JSON strings may contain U+2028 and similar characters unescaped."""
    text = '{"context": "One\u2028two\x85 three", "continuation": "four"}\r\n\n'
    (data / "lm_eval" / "lambada_openai.jsonl").write_bytes(text.encode())
    assert read_documents("lambada_openai", data) == [{"text": "One\u2028two\x85 three four"}]


def test_missing_files_are_reported(data, tmp_path):
    (data / "lm_eval" / "piqa.jsonl").unlink()
    with pytest.raises(TaskData, match=r"lacks lm_eval/piqa\.jsonl, so piqa cannot be evaluated"):
        check_files(["copa", "piqa"], data)


# --- the harness -------------------------------------------------------------------------------------

VOCABULARY = ByteTokenizer.vocab_size


@pytest.fixture
def evaluation():
    """The module that calls the harness and ``load_tasks``."""
    pytest.importorskip("lm_eval", reason="pip install -e '.[eval]'")
    from acp_repro.pipeline.evaluation import evaluation, tasks

    evaluation.load_tasks = tasks.load_tasks
    return evaluation


def fox():
    torch.manual_seed(0)
    config = FoXConfig.pro(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=2, initializer_range=0.3
    )
    return FoXForCausalLM(config).eval()


def fox_lm(evaluation, max_length: int = 512):
    return evaluation.harness_model(fox(), ByteTokenizer(), max_length=max_length, dtype="float32")


@pytest.mark.parametrize("max_length", [512, 24])
def test_scores_match_the_model(evaluation, data, max_length, tmp_path):
    """Every prompt and page starts with one BOS; at 24 tokens most prompts are truncated on the left."""
    model = fox()
    tasks, notes = evaluation.load_tasks(PAPER_TASKS, data)
    assert len(tasks) == 10 and any(note.startswith("sciq is skipped: ") for note in notes)
    results = evaluation.evaluate(fox_lm(evaluation, max_length), tasks, kept=tmp_path, identity={})
    for loaded, result in zip(tasks, results, strict=True):
        cut = 0
        assert len(loaded.task.instances) > 1
        for request in loaded.task.instances:
            *context, text = (part.encode() for part in request.args)
            ids = torch.tensor([[256, *b"".join(context), *text]])
            cut += len(ids[0]) > max_length + 1
            if context or len(text) <= max_length:
                ids = ids[:, -max_length - 1 :]
                with torch.no_grad():
                    expected = -model.loss_per_token(ids[:, :-1], ids[:, 1:])[0, -len(text) :].sum().item()
                score = request.resps[0][0] if context else request.resps[0]
                assert score == pytest.approx(expected, rel=1e-5), (loaded.name, request.args)
        assert result.truncated == (cut if context else 0)


def test_standard_error_of_a_perplexity_matches_the_bootstrap(evaluation, data):
    import random

    from lm_eval.api.metrics import perplexity, weighted_perplexity

    from acp_repro.pipeline.evaluation.evaluation import _metric

    draw = random.Random(0)
    single = [draw.gauss(-3, 0.5) for _ in range(400)]
    pairs = [(draw.gauss(-3, 0.1) * words, words) for words in (draw.randint(50, 150) for _ in range(200))]
    for numbers, aggregation in ((single, perplexity), (pairs, weighted_perplexity)):
        drawn = [aggregation(draw.choices(numbers, k=len(numbers))) for _ in range(1000)]
        mean = sum(drawn) / len(drawn)
        bootstrap = math.sqrt(sum((value - mean) ** 2 for value in drawn) / len(drawn))
        found = _metric(aggregation(numbers), numbers, aggregation)
        assert found.standard_error == pytest.approx(bootstrap, rel=0.1)


def test_prompts_match_the_harness(evaluation, data):
    tasks, _ = evaluation.load_tasks(["hellaswag", "winogrande", "boolq", "copa", "lambada_openai"], data)
    asked = {}
    for loaded in tasks:
        loaded.task.build_all_requests()
        asked[loaded.name] = [instance.args for instance in loaded.task.instances]
    assert asked["hellaswag"][0] == ("Roof repair: A man is on a roof. He", " sleeps.")
    assert asked["hellaswag"][4][0] == "Health: How to rest. Lie down. Close your eyes."
    assert asked["winogrande"][:2] == [
        ("The fox saw the dog, so the fox", " was seen."),
        ("The fox saw the dog, so the dog", " was seen."),
    ]
    assert asked["boolq"][0] == ("A fox is an animal.\nQuestion: is a fox a stone?\nAnswer:", " no")
    assert asked["copa"][0] == ("He fell because", "  he slept.")  # two spaces, as in the harness
    assert asked["copa"][2] == ("It rained, and hailed therefore", "  i ran.")
    assert asked["lambada_openai"][0] == ("The fox saw the dog, and so did the", " fox")


def test_interrupted_evaluation_resumes(evaluation, data, tmp_path):
    tasks, _ = evaluation.load_tasks(["piqa", "copa"], data)
    saved, said = {"kept": tmp_path / "kept", "identity": {}}, []

    def stop_at_the_second(line: str) -> None:
        if "copa" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluation.evaluate(fox_lm(evaluation), tasks, **saved, say=stop_at_the_second)
    results = evaluation.evaluate(fox_lm(evaluation), tasks, **saved, say=said.append)
    assert said == ["[1/2] piqa: finished before", "[2/2] copa: 2 items, from lm_eval/copa.jsonl"]
    tasks = evaluation.load_tasks(["piqa", "copa"], data)[0]
    fresh = evaluation.evaluate(fox_lm(evaluation), tasks, kept=tmp_path / "fresh", identity={})
    assert [(r.task, r.metrics, r.items) for r in results] == [(r.task, r.metrics, r.items) for r in fresh]
    # Another model, number of items or repetition is a new evaluation.
    for change in ({"identity": {"weights": "other"}}, {"items": 1}, {"again": True}):
        said.clear()
        evaluation.evaluate(fox_lm(evaluation), tasks, say=said.append, **(saved | change))
        assert not any("finished before" in line for line in said)


def test_unknown_tasks_and_unreachable_items_are_reported_in_one_line(evaluation, data, monkeypatch):
    with pytest.raises(UnknownName, match="there is no task 'helaswag'; did you mean hellaswag"):
        evaluation.load_tasks(["helaswag"], data)
    with pytest.raises(TaskData, match="not the items of sciq"):
        evaluation.load_tasks(["sciq"], data)
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(UserError, match=r"piqa cannot be fetched from the Hub \(no network\)"):
        evaluation.load_tasks(["piqa"])


def test_suite_results_and_table(make_suite, evaluation):
    """From training to Table 1, through the commands, over the tasks of the corpus."""
    from acp_repro import measure
    from analysis import drawing
    from tests.suites import YAML, records, train_run

    extra = "loss_tokens: 256, lm_eval_tasks: [book_last_word], lm_eval_items: 3}"
    for run in make_suite(YAML.replace("loss_tokens: 256}", extra)).runs:
        train_run(run)
    assert measure.main(["lm_eval", "lm_eval_items", "--suite", "mini", "--device", "cpu"]) == 0
    assert set(records("lm_eval")["items"]) == {3}
    assert len(records("lm_eval_items")) == 2 * 2 * 3  # runs, metrics, items
    assert (
        measure.main(["lm_eval", "same_weights_tasks", "--suite", "mini", "--force", "--device", "cpu"]) == 0
    )
    same = records("same_weights_tasks").iloc[0]
    assert (same["items"], same["differing_answers"]) == (3, 0) and same["largest_difference_nats"] < 0.01
    assert drawing.draw("mini", "table1").is_file()
