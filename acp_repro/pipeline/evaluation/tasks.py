"""Tasks of the harness: its own definitions, with items from the Hub, from local files, or from a book."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from acp_repro.common.errors import UserError
from acp_repro.pipeline.errors import UnknownName

from . import book
from .catalogue import BOOK_TASKS, PAPER_TASKS, TASKS
from .local_files import FILES, TaskData, check_files, read_documents

_HARNESS = Path(lm_eval.tasks.__file__).parent
# The harness's files for the paper's tasks, because reading all 14,000 definitions takes seven seconds.
_DEFINITIONS = {
    "wikitext": "wikitext/wikitext.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "copa": "super_glue/copa/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "sciq": "sciq/sciq.yaml",
    "boolq": "super_glue/boolq/default.yaml",
}
# Pages of a book are scored like articles of WikiText, but without WikiText's detokenisation.
_BOOK_PERPLEXITY = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{page}}",
    "metric_list": [
        {"metric": "word_perplexity"},
        {"metric": "byte_perplexity"},
        {"metric": "bits_per_byte"},
    ],
    "metadata": {"version": 1.0},
}


@dataclass(frozen=True)
class LoadedTask:
    """A task of the harness with its items. ``source`` is ``hub``, a path under the data folder, or ``shipped
    book``; ``fingerprint`` identifies items and prompts, as far as they are known."""

    name: str
    task: Task
    source: str
    fingerprint: str


def load_tasks(
    names: Sequence[str], data_dir: str | Path | None = None
) -> tuple[list[LoadedTask], list[str]]:
    """The tasks with their items, and a note for each task that is skipped or incomplete. ``data_dir`` is a
    folder with the layout of ``local_files.FILES``; None uses the Hub, which has all tasks of the harness."""
    more = data_dir is None and not set(names) <= set(TASKS)
    known = (*TASKS, *TaskManager().all_tasks) if more else TASKS
    for name in names:
        if name not in known:
            raise UnknownName.among(f"there is no task {name!r}", name, known)
    if data_dir is not None:
        check_files([name for name in names if name not in BOOK_TASKS], data_dir)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    loaded: list[LoadedTask] = []
    notes: list[str] = []
    for name in dict.fromkeys(names):
        try:
            loaded += (tasks := _load(name, data_dir))
            notes += _incomplete(tasks)
        except TaskData as error:
            if name != "sciq" or len(names) == 1:
                raise
            notes.append(f"{name} is skipped: {error}")  # its file may lack the distractors
    return loaded, notes


def _load(name: str, data_dir: str | Path | None) -> list[LoadedTask]:
    if name in BOOK_TASKS:
        return [_load_local(name, getattr(book, name)(), "test", "shipped book")]
    if data_dir is not None:
        file = FILES[name]
        return [_load_local(name, read_documents(name, data_dir), file.split, file.path)]
    return _load_from_hub(name)


def _incomplete(tasks: list[LoadedTask]) -> list[str]:
    """Notes for local files that are truncated, or of another split or version of the set."""
    there = [(task, len(task.task.eval_docs), FILES[task.name]) for task in tasks if task.name in FILES]
    return [
        f"{task.name}: {file.path} contains {items:,} items, the whole set has {file.items:,}"
        for task, items, file in there
        if task.source == file.path and items != file.items
    ]


def _load_local(name: str, documents: list[dict[str, Any]], split: str, source: str) -> LoadedTask:
    """The harness's task definition with local documents, following its guide for local data sets."""
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    with tempfile.TemporaryDirectory() as folder:
        items = Path(folder) / "items.jsonl"
        items.write_text(lines, encoding="utf-8")
        definition: dict[str, Any] = {
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {split: str(items)},
                "cache_dir": folder,
                "keep_in_memory": True,
            },
            **dict.fromkeys(("training_split", "validation_split", "test_split")),
            f"{split}_split": split,
        }
        if name == "book_perplexity":
            definition |= _BOOK_PERPLEXITY
        else:
            base = "lambada_openai" if name == "book_last_word" else name
            definition["include"] = str(_HARNESS / _DEFINITIONS[base])
        # JSON is YAML.
        (Path(folder) / f"{name}.yaml").write_text(json.dumps(definition), encoding="utf-8")
        manager = TaskManager(include_path=folder, include_defaults=False)
        task = manager.load([name])["tasks"][name]
    return LoadedTask(name, task, source, hashlib.sha256(lines.encode()).hexdigest())


def _load_from_hub(name: str) -> list[LoadedTask]:
    if name in PAPER_TASKS:
        folder = (_HARNESS / _DEFINITIONS[name]).parent
        manager = TaskManager(include_path=folder, include_defaults=False)
    else:
        manager = TaskManager()
    try:
        tasks = manager.load([name])["tasks"]
    except Exception as error:  # from the network, the Hub's client, datasets, or the task's own code
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"the items of {name} cannot be fetched from the Hub ({reason}); without a network put the "
            "tasks' files into a folder and pass it: --data-dir FOLDER, or lm_eval_data under measure in a "
            "suite file"
        ) from error
    loaded = []
    for task_name, task in tasks.items():
        # The fingerprint of the items by the library `datasets`.
        fingerprint = str(getattr(task.eval_docs, "_fingerprint", task.config.dataset_path))
        loaded.append(LoadedTask(task_name, task, "hub", fingerprint))
    return loaded
