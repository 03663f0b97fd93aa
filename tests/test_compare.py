"""``python -m acp_repro.compare``: any two evaluations of the harness, item by item."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from acp_repro import compare

ROOT = Path(__file__).parent.parent
DATE = "2026-01-31T12-00-00.123456"


def samples(folder: Path, task: str, metrics: dict[str, list], kind: str = "none", date: str = DATE) -> Path:
    """Writes a file in the format of lm-eval 0.4.13 with ``--log_samples --output_path``."""
    path = folder / "org__model" / f"samples_{task}_{date}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    count = len(next(iter(metrics.values())))
    with path.open("a", encoding="utf-8") as file:
        for i in range(count):
            doc = {"question": f"{task}\u2028{i}\x85"}  # unescaped in JSON lines
            line = {
                "doc_id": i,
                "doc": doc,
                "filter": kind,
                "metrics": list(metrics),
                "doc_hash": f"hash of {task} {i}",
            }
            line |= {name: values[i] for name, values in metrics.items()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    (path.parent / f"results_{date}.json").write_text("{}")
    return path


def right(count: int, of: int) -> list[float]:
    return [1.0] * count + [0.0] * (of - count)


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Folders ``a`` and ``b``: A is better at one task, equal at another, plus a perplexity task."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    words = [100 + i for i in range(40)]
    pages = random.normal(-300, 10, 40)
    for name, correct, shift in (("a", 560, 0.0), ("b", 500, -12.0)):
        folder = tmp_path / name
        accuracies = {"acc": right(correct, 1000), "mcc": [[1, 0]] * 1000}
        samples(folder, "piqa", accuracies)
        samples(folder, "arc_easy", {"acc": right(600, 5000)})
        both = {
            "word_perplexity": [[x + shift, n] for x, n in zip(pages, words, strict=True)],
            "bits_per_byte": [[x + shift, 6 * n] for x, n in zip(pages, words, strict=True)],
        }
        samples(folder, "wikitext", both)
    return tmp_path


def rows(*arguments: str) -> dict[tuple[str, str], dict[str, str]]:
    assert compare.main([*arguments, "--csv", "found.csv"]) == 0
    with Path("found.csv").open() as file:
        return {(row["task"], row["metric"]): row for row in csv.DictReader(file)}


def test_harness_folders_are_compared_item_by_item(two):
    found = rows("a", "b")
    assert list(found) == [
        ("arc_easy", "acc"),
        ("piqa", "acc"),
        ("wikitext", "bits_per_byte"),
        ("wikitext", "word_perplexity"),
    ]  # mcc is not a mean over items
    piqa = found["piqa", "acc"]
    assert (piqa["items"], piqa["a"], piqa["b"], piqa["verdict"]) == ("1000", "0.56", "0.5", "differ")
    assert float(piqa["difference"]) == pytest.approx(0.06)
    assert float(piqa["p_value"]) == pytest.approx(2 / 2**60)
    assert float(piqa["adjusted_p_value"]) == pytest.approx(4 * 2 / 2**60)
    # Bonett and Price: 61 up and 1 down of 1002.
    half = 1.95996 * math.sqrt((62 / 1002 - (60 / 1002) ** 2) / 1002)
    assert (float(piqa["low"]), float(piqa["high"])) == pytest.approx(
        (60 / 1002 - half, 60 / 1002 + half), abs=1e-6
    )
    assert found["arc_easy", "acc"]["verdict"] == "equivalent"
    wiki = found["wikitext", "word_perplexity"]
    total, words = sum(np.random.default_rng(0).normal(-300, 10, 40)), sum(range(100, 140))
    assert float(wiki["a"]) == pytest.approx(math.exp(-total / words))
    # A's page is 12 nats more likely, so its perplexity is lower.
    assert float(wiki["difference"]) == pytest.approx(-12 * 40 / words)
    bits = found["wikitext", "bits_per_byte"]
    assert float(bits["a"]) == pytest.approx(-total / words / 6 / math.log(2))
    assert float(bits["difference"]) == pytest.approx(-12 * 40 / words / 6 / math.log(2))


def test_overflowing_perplexity_is_compared_by_its_logarithm(two, capsys):
    samples(Path("good"), "toy", {"perplexity": [-5.0 - i % 3 for i in range(30)]})
    samples(Path("broken"), "toy", {"perplexity": [-800.0 - i % 3 for i in range(30)]})
    found = rows("broken", "good")["toy", "perplexity"]
    assert (found["a"], float(found["b"])) == ("inf", pytest.approx(math.exp(6)))
    assert float(found["difference"]) == pytest.approx(795)
    assert "inf" in capsys.readouterr().out


def test_agreement_on_few_items_is_not_equivalence(two):
    for name in "ab":
        samples(Path(name), "copa", {"acc": right(60, 100)})
    assert rows("a", "b", "--tasks", "copa")["copa", "acc"]["verdict"] == "open"
    assert rows("a", "b", "--tasks", "copa", "--margin", "0.05")["copa", "acc"]["verdict"] == "equivalent"
    margin = rows("a", "b", "--tasks", "piqa", "--margin", "0.1")
    assert margin["piqa", "acc"]["verdict"] == "differ, by less than the margin"


def test_filters_and_metrics_are_distinguished(two):
    for name in "ab":
        for kind, count in (("strict-match", 4), ("flexible-extract", 6)):
            samples(Path(name), "gsm8k", {"exact_match": right(count, 12)}, kind)
    found = rows("a", "b", "--tasks", "gsm8k")
    assert list(found) == [("gsm8k", "exact_match@flexible-extract"), ("gsm8k", "exact_match@strict-match")]
    assert list(rows("a", "b", "--metrics", "acc")) == [("arc_easy", "acc"), ("piqa", "acc")]


def test_missing_items_are_excluded_and_reported(two, capsys):
    path = samples(Path("c"), "piqa", {"acc": right(50, 100)})
    path.write_text(path.read_text().replace("hash of piqa 7", "another") + "\n")
    assert rows("a", str(path))["piqa", "acc"]["items"] == "89"  # 7 and 70 to 79 are other documents
    assert "89 items" in capsys.readouterr().out


def test_results_of_our_commands_can_be_compared(two):
    """Their items have a number instead of a hash."""
    kept = Path("kept/piqa-0123456789abcdef.json")
    kept.parent.mkdir()
    metric = {"value": 0.5, "standard_error": 0.0, "items": [[x, 1.0] for x in right(500, 1000)]}
    result = {"task": "piqa", "source": "hub", "metrics": {"acc": metric}, "items": 1000}
    kept.write_text(json.dumps({"key": {}, "result": result}))
    assert rows("a", "kept")["piqa", "acc"]["verdict"] == "differ"
    assert float(rows("b", str(kept))["piqa", "acc"]["difference"]) == 0
    runs = [str(ROOT / f"results/h200-long/pro-125m-16k-{run}") for run in ("acp", "exact")]
    with (ROOT / "figures/h200-long/table1.csv").open() as file:
        key = {"method": "acp - exact", "seed": "0.0", "task": "boolq", "metric": "acc"}
        (boolq,) = (row for row in csv.DictReader(file) if key.items() <= row.items())
    ours = rows(*runs, "--tasks", "boolq", "--metrics", "acc")["boolq", "acc"]
    assert float(ours["difference"]) == pytest.approx(float(boolq["value"]))
    assert float(ours["p_value"]) == pytest.approx(float(boolq["p_value"]))


MISTAKES = {
    "a nowhere": "nowhere does not exist; give a folder with samples_*.jsonl of lm-eval",
    "a empty": "empty contains no evaluation; give a folder with samples_*.jsonl of lm-eval --log_samples",
    "a b --tasks piqq": "'piqq' is not a task of both evaluations; did you mean piqa?",
    "a b --metrics mcc": "'mcc' is not a mean over items of both evaluations; ",
    "a other": "a and other have no task in common: arc_easy, piqa, wikitext; copa",
    "a strangers": "piqa acc: a and strangers have no item in common",
    "a twice": "both contain piqa; give one of them",
    "a broken/samples_piqa.jsonl": "samples_piqa.jsonl, line 2: not a sample of lm-eval",
    "a longer": "wikitext word_perplexity: a and longer count different words or bytes in an item",
    "damaged damaged": "damaged: copa perplexity: item 1 is nan, and only finite numbers",
}


def test_incomparable_input_is_reported_in_one_line(two, capsys):
    Path("empty").mkdir()
    samples(Path("other"), "copa", {"acc": [1.0]})
    path = samples(Path("strangers"), "piqa", {"acc": [1.0]})
    path.write_text(path.read_text().replace("hash of piqa", "hash of another"))
    samples(Path("twice"), "piqa", {"acc": [1.0]})
    samples(Path("twice"), "piqa", {"acc": [1.0]}, date="2026-02-01T12-00-00.123456")
    samples(Path("longer"), "wikitext", {"word_perplexity": [[-300.0, 7]]})
    samples(Path("damaged"), "copa", {"perplexity": [-1.0, math.nan]})
    Path("broken").mkdir()
    Path("broken/samples_piqa.jsonl").write_text(f"{path.read_text()}{{\n")
    for arguments, message in MISTAKES.items():
        assert compare.main(arguments.split())
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, arguments
