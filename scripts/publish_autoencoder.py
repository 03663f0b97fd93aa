"""Puts a trained pruning autoencoder into pretrained/, with a card that says how it was made.

    python scripts/publish_autoencoder.py --suite lap --run exact-1

Writes pretrained/lap-SIZE: config.json, model.safetensors (as trained), tokenizer.json and README.md, the
model card. The run must be trained and its `reconstruction` measured, for the card tells the scores.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from acp_repro.chain.command import command, run_command
from acp_repro.chain.records import read_records
from acp_repro.chain.suite import load_suite
from acp_repro.papers.lap.suite import PruningRun, PruningSuite
from acp_repro.training.run_folder import TrainingError, check_done

LARGEST_BYTES = 4_000_000  # what a clone should have to download
FILES = ("config.json", "model.safetensors", "tokenizer.json")

CARD = """# {name}

A pruning autoencoder ([on the method](../../docs/learnable-attention-pruning.md)): a T5 of {layers} encoder
and {decoder_layers} decoder blocks of width {width}, {parameters:,} weights in float32, with hard concrete
gates after encoder blocks {gates} (counted from 0) and a decoder that sees {window} tokens. It is here to
look at. It was trained from scratch on short sentences, so text of other kinds comes back with mistakes.

    python -m acp_repro.lap.compress pretrained/{name} --text "Return the number of items in the list."

| | |
|---|---|
| data | {data} |
| tokenizer | byte-pair encoding of {vocab:,} ids, trained on the same text (tokenizer.json) |
| longest text | {length} tokens, EOS included |
| trained for | {steps:,} steps of {batch} texts, lambda {compression:g} |
| trained on | {device}, in {seconds:.0f} seconds |
| tokens kept | {kept:.1%}, the others really removed |
| accuracy, true tokens before | {accuracy:.3f} |
| BLEU, ROUGE-L, true tokens before | {bleu:.3f}, {rouge:.3f} |
| whole texts, written freely | {exact:.1%} |
| retrain | `{command}`, then `python scripts/publish_autoencoder.py --suite {suite} --run {run}` |

Scores are of {texts} sentences that were held out. `make table_scores SUITE={suite}` trains the suite's
models anew and scores those. The sentences are under Python's licence, the weights under that of the
project.
"""


@command()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--suite", default="lap", help="default: lap")
    parser.add_argument("--run", default="exact-1", help="default: exact-1")
    parser.add_argument("--folder", type=Path, default=Path("pretrained"), help="default: pretrained")
    options = parser.parse_args(arguments)
    suite = load_suite(options.suite)
    run = suite.run(options.run)
    check_done(run)
    print(publish(suite, run, options.folder))
    return 0


def publish(suite: PruningSuite, run: PruningRun, folder: Path) -> Path:
    """Copies ``run`` into ``folder``/lap-SIZE and returns that.

    Raises:
        RecordError: its reconstruction is not measured.
        TrainingError: the weights are larger than :data:`LARGEST_BYTES`.
    """
    size = (run.model_folder / "model.safetensors").stat().st_size
    if size > LARGEST_BYTES:
        raise TrainingError(f"{run.model_folder}: {size:,} bytes of weights, more than {LARGEST_BYTES:,}")
    parameters = json.loads((run.folder / "run.json").read_text())["parameters"]
    folder = folder / f"lap-{parameters / 1e6:.1f}m"
    card = _card(suite, run, folder.name, parameters)
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(run.model_folder / name, folder / name)
    (folder / "README.md").write_text(card)
    return folder


def _card(suite: PruningSuite, run: PruningRun, name: str, parameters: int) -> str:
    scores = read_records(suite, "reconstruction", [run]).set_index("decoding")
    removed, free = scores.loc["removed"], scores.loc["free"]
    done = json.loads((run.folder / "done.json").read_text())
    described = json.loads((run.folder / "run.json").read_text())
    settings, data = run.pruning_config(), run.data
    texts = f"{described['data']['train_texts']:,} texts of `corpus: {data.corpus}`"
    if data.corpus == "stdlib":
        texts += f", sentences of {data.shortest} to {data.longest} characters of its documentation"
    return CARD.format(
        name=name,
        suite=suite.name,
        run=run.name,
        command=run.command,
        layers=run.model.num_layers,
        decoder_layers=run.model.num_decoder_layers,
        width=run.model.d_model,
        parameters=parameters,
        gates=" and ".join(map(str, settings.gated_blocks(run.model.num_layers))),
        window=settings.decoder_window,
        data=texts,
        vocab=data.vocabulary,
        length=settings.max_length,
        steps=run.training.steps,
        batch=run.training.batch_texts,
        compression=run.compression,
        device=described["device"],
        seconds=done["seconds"],
        kept=removed["kept_ratio"],
        accuracy=removed["token_accuracy"],
        bleu=removed["bleu"],
        rouge=removed["rouge_l"],
        exact=free["exact_match"],
        texts=removed["measured_texts"],
    )


if __name__ == "__main__":
    run_command(main)
