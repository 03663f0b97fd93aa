"""Puts a trained run with gates into pretrained/, where `python -m acp_repro.retention.show` finds it.

    python scripts/publish_retention.py --suite retention --run stdlib-tiny-ar-30-input --name ar-tiny-stdlib

Writes pretrained/NAME: what `save_pretrained` wrote with weights in bfloat16, the tokeniser, the names of the
classes, and README.md, the model card. The run must be trained and its `score` measured, and so must a dense
run of its task and seed, for the card tells both.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

from acp_repro.chain.command import command, run_command
from acp_repro.chain.records import read_records
from acp_repro.chain.suite import load_suite
from acp_repro.papers.retention.suite import RetentionRun, RetentionSuite
from acp_repro.papers.retention.task import load_model
from acp_repro.training.run_folder import TrainingError, check_done

LARGEST_BYTES = 4_000_000  # what a clone should have to download

CARD = """# {name}

An encoder of {layers} blocks of width {width} ({parameters:,} weights, in bfloat16) that says which package a
part of the Python standard library comes from, and keeps {budget:.0%} of its tokens: a gate
{place} of Adaptive Retention (`acp_repro.retention`) chooses them. It is here to look at:

    python -m acp_repro.retention.show pretrained/{name} --file {example}

| | |
|---|---|
| data | parts of {characters} characters of {classes}, the package's own name left out |
| tokeniser | byte-pair encoding of {vocab:,} ids, trained on the same text |
| longest text | {length} tokens |
| accuracy on {examples:,} test parts | {accuracy:.1f} % with {kept:.0%} of the tokens, dense {dense:.1f} % |
| trained on | {tokens:,} tokens, on {device}, in {seconds:.0f} seconds |
| retrain | `{command}`, then `{publish}` |

The scores are those of the float32 weights that were trained. The text of the standard library is under
Python's licence; the weights are under the licence of the project.
"""


@command()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--suite", default="retention", help="default: retention")
    parser.add_argument("--run", default="stdlib-tiny-ar-30-input", help="default: stdlib-tiny-ar-30-input")
    parser.add_argument("--name", default="ar-tiny-stdlib", help="of the folder (default: ar-tiny-stdlib)")
    parser.add_argument("--folder", type=Path, default=Path("pretrained"), help="default: pretrained")
    options = parser.parse_args(arguments)
    suite = load_suite(options.suite)
    run = suite.run(options.run)
    check_done(run)
    print(publish(suite, run, options.folder / options.name))
    return 0


def publish(suite: RetentionSuite, run: RetentionRun, folder: Path) -> Path:
    """Copies ``run`` into ``folder`` and returns it.

    Raises:
        RecordError: a score is not measured.
        TrainingError: the weights are larger than :data:`LARGEST_BYTES`, or no dense run is beside it.
    """
    card = _card(suite, run, folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    load_model(run.model_folder).to(torch.bfloat16).save_pretrained(folder)
    for file in run.model_folder.iterdir():
        if file.name.startswith("tokenizer") or file.name == "classes.json":
            shutil.copy(file, folder)
    size = (folder / "model.safetensors").stat().st_size
    if size > LARGEST_BYTES:
        raise TrainingError(f"{folder}: {size:,} bytes of weights, more than {LARGEST_BYTES:,}")
    (folder / "README.md").write_text(card)
    return folder


def _card(suite: RetentionSuite, run: RetentionRun, name: str) -> str:
    dense = [r for r in suite.dense if (r.dataset_name, r.seed) == (run.dataset_name, run.seed)]
    if not dense:
        raise TrainingError(f"{run.name}: no dense run of its task and seed in suite {suite.name}")
    ours, whole = (_score(suite, r) for r in (run, dense[0]))
    model = load_model(run.model_folder)
    done = json.loads((run.folder / "done.json").read_text())
    description = json.loads((run.folder / "run.json").read_text())
    return CARD.format(
        name=name,
        command=run.command,
        publish=f"python scripts/publish_retention.py --suite {suite.name} --run {run.name} --name {name}",
        layers=run.backbone.num_hidden_layers,
        width=run.backbone.hidden_size,
        parameters=sum(p.numel() for p in model.parameters()),
        budget=run.budget,
        place="at the input" if run.gates == "input" else run.gates.replace("_", " "),
        example="acp_repro/common/files.py",
        characters=run.dataset.options.get("characters", 600),
        classes=", ".join(json.loads((run.model_folder / "classes.json").read_text())),
        vocab=model.config.vocab_size,
        length=run.dataset.max_tokens,
        accuracy=ours["score_percent"],
        kept=ours["kept_share"],
        dense=whole["score_percent"],
        examples=ours["measured_examples"],
        tokens=done["tokens"],
        seconds=done["seconds"],
        device=description["device"],
    )


def _score(suite: RetentionSuite, run: RetentionRun):
    """The first score of the test split."""
    scores = read_records(suite, "score", [run])
    return scores[scores["split"] == "test"].iloc[0]


if __name__ == "__main__":
    run_command(main)
