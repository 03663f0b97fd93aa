"""Downstream tasks: our numbers are the harness's own, tasks are rewritten as on the Hub, nothing is lost."""

import json
import math

import pytest
import torch

from acp_repro.chain.errors import UnknownName
from acp_repro.data import ByteTokenizer
from acp_repro.papers.acp.evaluation import book, local_files
from acp_repro.papers.acp.evaluation.catalogue import PAPER_TASKS
from acp_repro.papers.acp.evaluation.local_files import TaskData, read_documents

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
    """A folder of task data in the layout of ``local_files``, a few items a task."""
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


def test_local_files_become_the_columns_of_the_hub(data):
    first = {task: read_documents(task, data)[0] for task in PAPER_TASKS if task != "sciq"}
    assert first["lambada_openai"] == {"text": "The fox saw the dog, and so did the fox"}
    assert first["piqa"]["goal"] == "How do I swim?" and first["piqa"]["label"] == 0
    assert first["arc_easy"]["question"] == "What is red?" and first["arc_easy"]["answerKey"] == "0"
    assert first["copa"] == {
        "premise": "He fell.",
        "question": "cause",
        "choice1": "he slept.",
        "choice2": "it was icy.",
        "label": 1,
    }
    assert read_documents("copa", data)[1]["premise"] == "It rained, and hailed."
    assert first["boolq"] == {"passage": "A fox is an animal.", "question": "is a fox a stone", "label": 0}
    roof, rest = read_documents("hellaswag", data)
    assert (roof["activity_label"], roof["ctx_a"], roof["ctx_b"]) == (
        "Roof repair",
        "A man is on a roof.",
        "he",
    )
    assert roof["label"] == "3" and len(roof["endings"]) == 4
    assert (rest["ctx_a"], rest["ctx_b"]) == ("How to rest. Lie down. Close your eyes.", "")
    pages = [document["page"] for document in read_documents("wikitext", data)]
    assert len(pages) == 2 and "= = Food = =" in pages[0] and pages[1].startswith(" = Hen = ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n", "piqa.jsonl: line 1 is not JSON"),
        ("", "piqa.jsonl: holds no item of piqa"),
        ('{"query": "Q"}\n', r"piqa.jsonl: line 1 is not an item of this task \(KeyError: 'choices'\)"),
        ('{"query": "Question: a\\n", "choices": ["a", "b"], "gold": 2}\n', "right answer is number 2 of 2"),
        ('{"query": "a", "choices": ["a", "b"], "gold": 1}\n', "does not stand between 'Question: '"),
        ('{"query": 5, "choices": ["a", "b"], "gold": 1}\n', "line 1 .*'query' is 5 in place of text"),
        (
            '{"query": "Question: a\\n", "choices": [1, 2], "gold": 1}\n',
            r"\[1, 2\] in place of a list of texts",
        ),
        (
            '{"query": "Question: a\\n", "choices": ["a", "b"], "gold": 0.5}\n',
            "right answer is number 0.5 of",
        ),
        ('\n{"query": "Question: a\\n", "choices": "ab", "gold": 1}\n', "line 2 .*'ab' in place of a list"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(data, text, message):
    (data / "lm_eval" / "piqa.jsonl").write_text(text)
    with pytest.raises(TaskData, match=message) as caught:
        read_documents("piqa", data)
    assert "\n" not in str(caught.value)


def test_a_line_ends_where_json_lines_end(data):
    """U+2028 and its like may stand in a string of JSON as they are."""
    text = '{"context": "One\u2028two\x85 three", "continuation": "four"}\r\n\n'
    (data / "lm_eval" / "lambada_openai.jsonl").write_bytes(text.encode())
    assert read_documents("lambada_openai", data) == [{"text": "One\u2028two\x85 three four"}]


def test_missing_files_are_named(data, tmp_path):
    (data / "lm_eval" / "piqa.jsonl").unlink()
    with pytest.raises(
        TaskData, match=r"piqa\.jsonl is missing, so piqa cannot be evaluated; add it, or leave"
    ):
        read_documents("piqa", data)
    with pytest.raises(TaskData, match="stands where the first article's heading should"):
        (data / "wikitext2" / "wiki.test.raw").write_text("<html>404</html>\n")
        read_documents("wikitext", data)
    with pytest.raises(TaskData, match="no such folder of task data"):
        read_documents("piqa", tmp_path / "nowhere")
    with pytest.raises(local_files.NoDistractors, match=r"sciq_test\.jsonl: has no wrong answers"):
        read_documents("sciq", data)


def test_the_tasks_of_the_book_are_long_enough_and_keep_what_they_promise():
    pages, passages = book.book_perplexity(), book.book_last_word()
    assert len(pages) > 150 and all(len(page["page"]) >= 3000 for page in pages)
    assert len(passages) >= 100
    for passage in passages:
        *before, last = passage["text"].split(" ")
        assert last.isalpha() and len(last) >= 5 and last in " ".join(before)
    assert passages == book.book_last_word()


# --- the harness -------------------------------------------------------------------------------------

VOCABULARY = ByteTokenizer.vocab_size


@pytest.fixture
def harness():
    return pytest.importorskip("lm_eval", reason="pip install -e '.[eval]'")


@pytest.fixture
def evaluation(harness):
    from acp_repro.papers.acp.evaluation import evaluation, tasks
    from acp_repro.papers.acp.evaluation import harness as ours
    from acp_repro.papers.acp.fits import OtherTokenizer as Other

    class Parts:
        evaluate, TaskResult = staticmethod(evaluation.evaluate), evaluation.TaskResult
        load_tasks, TaskUnavailable = staticmethod(tasks.load_tasks), tasks.TaskUnavailable
        FoXLM, OtherTokenizer = ours.FoXLM, Other

    return Parts


def fox():
    from tests.measure.test_scoring import FoXConfig, FoXForCausalLM

    torch.manual_seed(0)
    config = FoXConfig.pro(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=2, initializer_range=0.3
    )
    return FoXForCausalLM(config).eval()


def fox_lm(evaluation, max_length: int = 512, **options):
    return evaluation.FoXLM.of(fox(), ByteTokenizer(), max_length=max_length, progress=False, **options)


class AsFoX(torch.nn.Module):
    """A model of transformers with the interface that the scoring core asks for."""

    def __init__(self, model):
        super().__init__()
        self.base, self.lm_head, self.config = model.model, model.lm_head, model.config

    def forward(self, input_ids, cache=None, return_hidden=True):
        assert cache is None and return_hidden
        return self.base(input_ids).last_hidden_state


def stock_model(max_length: int):
    """A small LLaMA with random weights, and a byte-pair tokeniser, both of transformers."""
    transformers = pytest.importorskip("transformers", reason="pip install 'lm-eval[hf]'")
    pytest.importorskip("accelerate", reason="pip install 'lm-eval[hf]'")
    tokenizers = pytest.importorskip("tokenizers", reason="pip install -e '.[bpe]'")
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator([json.dumps(items) for items in ITEMS.values()] + [HELLASWAG, WIKITEXT], trainer)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        add_bos_token=True,
        **dict.fromkeys(("eos_token", "bos_token", "pad_token"), "<|endoftext|>"),
    )
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=raw.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=max_length,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).eval(), theirs, raw


@pytest.mark.parametrize("max_length", [512, 24])
def test_our_numbers_are_those_of_the_harness_on_a_stock_model(evaluation, data, max_length):
    """All of the paper's tasks that there are, over the same files; at 24 tokens most prompts are cut."""
    model, theirs, raw = stock_model(max_length)
    import lm_eval.evaluator
    from lm_eval.models.huggingface import HFLM

    from acp_repro.data import BPETokenizer

    options = {"tokenizer": theirs, "backend": "causal", "batch_size": 3, "max_length": max_length}
    stock = HFLM(pretrained=model, add_bos_token=True, **options)
    # It puts BOS in front of whole pages itself, and would put a second one there.
    of_pages = HFLM(pretrained=model, add_bos_token=False, **options)
    ours = evaluation.FoXLM.of(
        AsFoX(model),
        BPETokenizer(raw.to_str()),
        max_length=max_length,
        share_contexts=False,
        batch_tokens=100,
        progress=False,
    )
    tasks, notes = evaluation.load_tasks(PAPER_TASKS, data)
    assert len(tasks) == 10 and any(note.startswith("sciq is left out: ") for note in notes)
    results = evaluation.evaluate(ours, tasks)
    assert any(result.truncated for result in results) == (max_length == 24)
    again, _ = evaluation.load_tasks(PAPER_TASKS, data)
    for task, result in zip(again, results, strict=True):
        lm = of_pages if task.task.OUTPUT_TYPE == "loglikelihood_rolling" else stock
        expected = lm_eval.evaluator.evaluate(lm, {task.name: task.task}, bootstrap_iters=100)
        numbers = expected["results"][task.name]
        assert {f"{name},none" for name in result.metrics} == {
            key for key in numbers if key.endswith(",none") and "_stderr" not in key
        }
        for name, metric in result.metrics.items():
            assert metric.value == pytest.approx(numbers[f"{name},none"], rel=1e-5), (task.name, name)
            error = numbers.get(f"{name}_stderr,none")
            if name.startswith("acc"):
                assert metric.standard_error == pytest.approx(error, abs=1e-12)
            for (value, weight), sample in zip(metric.items, expected["samples"][task.name], strict=True):
                theirs_too = sample[name] if isinstance(sample[name], tuple) else (sample[name], 1.0)
                assert (value, weight) == pytest.approx(theirs_too, rel=1e-4, abs=1e-4)


def test_the_standard_error_of_a_perplexity_is_that_of_the_bootstrap(evaluation, data):
    import random

    from lm_eval.api.metrics import perplexity, weighted_perplexity

    from acp_repro.papers.acp.evaluation.evaluation import _metric

    draw = random.Random(0)
    single = [draw.gauss(-3, 0.5) for _ in range(400)]
    pairs = [(draw.gauss(-3, 0.1) * words, words) for words in (draw.randint(50, 150) for _ in range(200))]
    for numbers, aggregation in ((single, perplexity), (pairs, weighted_perplexity)):
        drawn = [aggregation(draw.choices(numbers, k=len(numbers))) for _ in range(1000)]
        mean = sum(drawn) / len(drawn)
        bootstrap = math.sqrt(sum((value - mean) ** 2 for value in drawn) / len(drawn))
        found = _metric(aggregation(numbers), numbers, aggregation)
        assert found.standard_error == pytest.approx(bootstrap, rel=0.1)


def test_prompts_are_the_harness_s_own(evaluation, data):
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
    assert asked["copa"][0] == ("He fell because", "  he slept.")  # two spaces, the harness's own slip
    assert asked["copa"][2] == ("It rained, and hailed therefore", "  i ran.")
    assert asked["lambada_openai"][0] == ("The fox saw the dog, and so did the", " fox")


def test_a_stopped_evaluation_goes_on_where_it_was(evaluation, data, tmp_path):
    tasks, notes = evaluation.load_tasks(["piqa", "copa"], data)
    assert notes[0] == "piqa: lm_eval/piqa.jsonl holds 3 items, the whole set has 1,838"
    (data / "lm_eval" / "boolq.jsonl").unlink()
    (data / "lm_eval" / "winogrande.jsonl").unlink()
    with pytest.raises(
        TaskData, match="winogrande.jsonl, lm_eval/boolq.jsonl are missing, so winogrande, boolq"
    ):
        evaluation.load_tasks(["winogrande", "piqa", "boolq"], data)
    kept, said = tmp_path / "kept", []

    class Stop(Exception):
        pass

    def stop_at_the_second(line: str) -> None:
        said.append(line)
        if "copa" in line:
            raise Stop

    evaluation.evaluate(fox_lm(evaluation), tasks, kept=kept)
    with pytest.raises(Stop):  # --again forgets what was finished, of all tasks
        evaluation.evaluate(fox_lm(evaluation), tasks, kept=kept, say=stop_at_the_second, again=True)
    assert [path.name.partition("-")[0] for path in kept.iterdir()] == ["piqa"]
    said.clear()
    tasks, _ = evaluation.load_tasks(["piqa", "copa"], data)
    results = evaluation.evaluate(fox_lm(evaluation), tasks, kept=kept, say=said.append)
    assert said == ["[1/2] piqa: finished before", "[2/2] copa: 2 items, from lm_eval/copa.jsonl"]
    tasks, _ = evaluation.load_tasks(["piqa", "copa"], data)
    fresh = evaluation.evaluate(fox_lm(evaluation), tasks)
    assert [(r.task, r.metrics, r.items) for r in results] == [(r.task, r.metrics, r.items) for r in fresh]
    # Another model, another number of items or another length is another evaluation.
    for change in ({"identity": {"weights": "other"}}, {"items": 1}):
        said.clear()
        tasks, _ = evaluation.load_tasks(["piqa"], data)
        evaluation.evaluate(fox_lm(evaluation), tasks, kept=kept, say=said.append, **change)
        assert "finished before" not in said[0]
    # So is another tokeniser of the same name; and what was kept before is still there.
    other = fox_lm(evaluation)
    other.tokenizer = type("Other", (ByteTokenizer,), {"json_text": "another"})()
    assert other.tokenizer_name == fox_lm(evaluation).tokenizer_name
    said.clear()
    evaluation.evaluate(other, tasks, kept=kept, say=said.append)
    evaluation.evaluate(fox_lm(evaluation), tasks, kept=kept, say=said.append)
    evaluation.evaluate(fox_lm(evaluation), tasks, kept=kept, again=True, say=said.append)
    assert ["finished before" in line for line in said] == [False, True, False]


@pytest.mark.parametrize("task", ["piqa", "wikitext"])
def test_a_task_that_was_stopped_keeps_its_scores(evaluation, data, tmp_path, monkeypatch, task):
    from acp_repro.papers.acp.evaluation.scoring import Scorer

    batches, score = [], Scorer._one_pass

    def count(scorer, batch):
        batches.append(batch)
        return score(scorer, batch)

    def stop_at_the_third(scorer, batch):
        if len(batches) == 2:
            raise KeyboardInterrupt
        return count(scorer, batch)

    def run(one_pass, **options):
        batches.clear()
        monkeypatch.setattr(Scorer, "_one_pass", one_pass)
        tasks, _ = evaluation.load_tasks([task], data)
        # So short that some requests are cut: their number is kept, too.
        lm = fox_lm(evaluation, max_length=32, batch_tokens=1, share_contexts=False)
        return evaluation.evaluate(lm, tasks, **options)[0]

    whole, all_batches = run(count), len(batches)
    with pytest.raises(KeyboardInterrupt):
        run(stop_at_the_third, kept=tmp_path / "kept")
    (unfinished,) = (tmp_path / "kept").iterdir()
    found = run(count, kept=tmp_path / "kept")
    assert len(batches) == all_batches - 2 and not unfinished.exists()
    assert (found.metrics, found.truncated) == (whole.metrics, whole.truncated)


def test_unknown_tasks_and_unreachable_items_are_one_line(evaluation, data, monkeypatch):
    with pytest.raises(UnknownName, match="there is no task 'helaswag'; did you mean hellaswag"):
        evaluation.load_tasks(["helaswag"], data)
    with pytest.raises(evaluation.TaskUnavailable, match="no task is left to evaluate; sciq is left out"):
        evaluation.load_tasks(["sciq"], data)
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(
        evaluation.TaskUnavailable, match=r"piqa cannot be fetched from the Hub \(no network\)"
    ):
        evaluation.load_tasks(["piqa"])


def test_a_tokeniser_that_is_not_the_model_s_is_refused(evaluation):
    class Large:
        vocab_size, bos_id = 50257, 50256

    with pytest.raises(evaluation.OtherTokenizer, match="model has 257 token ids and the tokenizer 50257"):
        evaluation.FoXLM.of(fox(), Large(), max_length=64)


def test_generation_stops_where_the_task_says(evaluation):
    from lm_eval.api.instance import Instance

    lm = fox_lm(evaluation)
    whole = lm.scorer.model.generate(torch.tensor([ByteTokenizer().prompt("a fox")]), 20)[0, 6:].tolist()
    text = ByteTokenizer().decode(whole[: whole.index(256)] if 256 in whole else whole)

    def ask(prompt: str, until: list[str]) -> Instance:
        options = {"until": until, "max_gen_toks": 20}
        return Instance("generate_until", {}, (prompt, options), 0)

    stop = text[7:9]
    found = lm.generate_until([ask("a fox", []), ask("a fox", [stop]), ask("longer prompt", [])])
    assert found[0] == text and found[1] == text[: text.index(stop)]
    alone = lm.generate_until([ask("longer prompt", [])])
    assert found[2] == alone[0]


def test_a_suite_s_records_and_its_table(evaluation, tmp_path, monkeypatch):
    """From training to Table 1, through the commands, over the book's tasks."""
    from acp_repro import measure
    from acp_repro.chain.suite import load_suite
    from analysis import drawing
    from tests.suites import YAML, records, train_run, write_suite

    monkeypatch.chdir(tmp_path)
    extra = "loss_tokens: 256, lm_eval_tasks: [book_last_word], lm_eval_items: 3}"
    write_suite(tmp_path, YAML.replace("loss_tokens: 256}", extra))
    for run in load_suite("mini").runs:
        train_run(run)
    assert measure.main(["lm_eval", "lm_eval_items", "--suite", "mini", "--device", "cpu"]) == 0
    table = records("lm_eval")
    assert set(table["task"]) == {"book_last_word"} and set(table["items"]) == {3}
    assert table["begins_with_bos"].all()
    items = records("lm_eval_items")
    assert len(items) == 2 * 2 * 3  # runs, metrics, items
    path = drawing.draw("mini", "table1")
    text = path.read_text()
    assert "not the paper's tasks" in text and "ACP − exact" in text
