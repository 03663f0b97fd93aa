"""The paper's tasks from files in a folder, for machines that cannot reach the Hub. Standard library only.

The files have the formats of other projects: prompts of llm-foundry, six lines per item for llama.cpp's
HellaSwag, and WikiText as published. Each file is converted to the columns that the set has on the Hub, so
that the harness's own task definition creates the prompts.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acp_repro.common.errors import UserError

Document = dict[str, Any]


class TaskData(UserError, ValueError):
    """A file of a task is missing or has the wrong content."""


@dataclass(frozen=True)
class LocalFile:
    """The file of a task in the data folder. ``read`` converts its text to documents with the Hub's columns.
    The harness evaluates ``split``; the whole set has ``items`` items."""

    path: str
    split: str
    items: int
    read: Callable[[str], Iterator[Document]]


def check_files(tasks: Iterable[str], folder: str | Path) -> None:
    """Raises an error if the folder lacks the file of a task."""
    missing = [name for name in tasks if not (Path(folder) / FILES[name].path).is_file()]
    if missing:
        raise TaskData(
            f"{folder} lacks {', '.join(FILES[name].path for name in missing)}, so {', '.join(missing)} "
            "cannot be evaluated; add the missing files, or omit these tasks"
        )


def read_documents(task: str, folder: str | Path) -> list[Document]:
    """The items of a task with the columns of its set on the Hub."""
    file = FILES[task]
    path = Path(folder) / file.path
    try:
        documents = list(file.read(path.read_text(encoding="utf-8")))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise TaskData(f"{path}: not the items of {task} ({type(error).__name__}: {error})") from error
    if not documents:
        raise TaskData(f"{path}: contains no item of {task}; copy the file again")
    return documents


def _json_lines(make: Callable[[Document], Document]) -> Callable[[str], Iterator[Document]]:
    """A reader of JSON lines; ``make`` converts each line to a document."""
    return lambda text: (make(json.loads(line)) for line in text.split("\n") if line.strip())


def _between(text: str, before: str, after: str) -> str:
    """``text`` without its fixed beginning and end."""
    if not (text.startswith(before) and text.endswith(after)):
        raise ValueError(f"{text[:40]!r}... does not begin with {before!r} and end with {after!r}")
    return text[len(before) : len(text) - len(after)]


def _gold(item: Document, choices: list) -> int:
    if type(item["gold"]) is not int or not 0 <= item["gold"] < len(choices):
        raise ValueError(f"the right answer has index {item['gold']} of {len(choices)} choices")
    return item["gold"]


def _wikitext(text: str) -> Iterator[Document]:
    """Articles, which begin with a heading of the first level: `` = Title = ``."""
    article: list[str] = []
    begun = False
    for line in text.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if any(map(str.strip, article)):
                yield {"page": "\n".join(article)}
            article, begun = [], True
        elif line.strip() and not begun:
            raise ValueError(f"{line[:40]!r} precedes the heading of the first article, ' = Title = '")
        article.append(line)
    if any(map(str.strip, article)):
        yield {"page": "\n".join(article)}


def _lambada(item: Document) -> Document:
    return {"text": f"{item['context']} {item['continuation']}"}


def _piqa(item: Document) -> Document:
    first, second = choices = item["choices"]
    goal = _between(item["query"], "Question: ", "\n")
    return {"goal": goal, "sol1": first, "sol2": second, "label": _gold(item, choices)}


def _hellaswag(text: str) -> Iterator[Document]:
    """Documents from six lines per item: "activity: context", the index of the right ending, four endings.

    If the context does not end with a sentence, its incomplete last sentence is ``ctx_b``. The harness
    capitalises ``ctx_b``, which is in lower case in these lines.
    """
    lines = text.rstrip("\n").split("\n")
    if len(lines) % 6:
        raise ValueError(f"{len(lines)} lines are not a multiple of six, the lines per item")
    for start in range(0, len(lines), 6):
        context, label, *endings = lines[start : start + 6]
        activity, _, context = context.partition(": ")
        begun = re.search(r"(?:^|(?<=[.!?] ))[^.!?]*(?:[.!?]\S[^.!?]*)*$", context)
        split = begun.start() if begun and not context.rstrip().endswith((".", "!", "?")) else len(context)
        yield {
            "activity_label": activity,
            "ctx_a": context[:split].rstrip(),
            "ctx_b": context[split:],
            "endings": endings,
            "label": str(_gold({"gold": int(label)}, endings)),
        }


def _winogrande(item: Document) -> Document:
    """A document from two contexts, which end in the two names, and the text that follows both."""
    first, second = item["context_options"]
    return {
        "sentence": f"_ {item['continuation']}",
        "option1": first,
        "option2": second,
        "answer": str(1 + _gold(item, [first, second])),
    }


def _arc(item: Document) -> Document:
    return {"question": _between(item["query"], "Question: ", ""), **_choices(item)}


def _openbookqa(item: Document) -> Document:
    return {"question_stem": item["query"], **_choices(item)}


def _choices(item: Document) -> Document:
    choices = item["choices"]
    labels = [str(number) for number in range(len(choices))]
    return {"choices": {"text": choices, "label": labels}, "answerKey": labels[_gold(item, labels)]}


def _copa(item: Document) -> Document:
    """A document from "Premise, because" or "Premise, therefore"; the harness expects no comma."""
    query = item["query"]
    premise, comma, connector = query.rpartition(", ")
    if not comma:
        raise ValueError(f"{query[:40]!r}... has no ', because' or ', therefore'")
    first, second = choices = item["choices"]
    return {
        "premise": f"{premise}.",
        "question": {"because": "cause", "therefore": "effect"}[connector],
        "choice1": first,
        "choice2": second,
        "label": _gold(item, choices),
    }


def _boolq(item: Document) -> Document:
    passage, _, question = item["query"].rpartition("\nQuestion: ")
    return {
        "passage": _between(passage, "Passage: ", ""),
        "question": _between(question, "", "?"),
        "label": _gold(item, item["choices"]),
    }


def _sciq(item: Document) -> Document:
    columns = ("question", "support", "correct_answer", "distractor1", "distractor2", "distractor3")
    return {column: item[column] for column in columns}


FILES = {
    "wikitext": LocalFile("wikitext2/wiki.test.raw", "test", 62, _wikitext),
    "lambada_openai": LocalFile("lm_eval/lambada_openai.jsonl", "test", 5153, _json_lines(_lambada)),
    "piqa": LocalFile("lm_eval/piqa.jsonl", "validation", 1838, _json_lines(_piqa)),
    "hellaswag": LocalFile("hellaswag/hellaswag_val_full.txt", "validation", 10_042, _hellaswag),
    "winogrande": LocalFile("lm_eval/winogrande.jsonl", "validation", 1267, _json_lines(_winogrande)),
    "arc_easy": LocalFile("lm_eval/arc_easy.jsonl", "test", 2376, _json_lines(_arc)),
    "arc_challenge": LocalFile("lm_eval/arc_challenge.jsonl", "test", 1172, _json_lines(_arc)),
    "copa": LocalFile("lm_eval/copa.jsonl", "validation", 100, _json_lines(_copa)),
    "openbookqa": LocalFile("lm_eval/openbook_qa.jsonl", "test", 500, _json_lines(_openbookqa)),
    "sciq": LocalFile("sciq/sciq_test.jsonl", "test", 1000, _json_lines(_sciq)),
    # In this file the passages lack their titles.
    "boolq": LocalFile("lm_eval/boolq.jsonl", "validation", 3270, _json_lines(_boolq)),
}
