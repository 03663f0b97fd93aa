"""Puts a trained run into pretrained/, where suite `pretrained` finds it.

    python scripts/publish_pretrained.py --suite small --run pro-3m-4k-acp

Writes pretrained/RUN: config.json, model.safetensors (bfloat16, half the size), tokenizer.json, done.json
and README.md, the model card. The run must be trained and its `loss` and `pruned_ratio` measured, for the
card tells both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from acp_repro.chain.command import command, run_command
from acp_repro.chain.records import read_records
from acp_repro.chain.suite import load_suite
from acp_repro.common import files
from acp_repro.data import prepare
from acp_repro.papers.acp.suite import FoXRun, FoXSuite
from acp_repro.training.run_folder import check_done

LARGEST_BYTES = 12_000_000  # what a clone should have to download

CARD = """# {name}

A Forgetting Transformer (FoX, {architecture}) of {layers} layers, width {width}, {heads} heads of
{head_dim}, {parameters:,} weights without the input embedding, in bfloat16, trained with adaptive
computation pruning (log epsilon = {tolerance:g}). It is here to look at: its heads are local and global as in
large models.

| | |
|---|---|
| data | {data} |
| tokenizer | byte-pair encoding of {vocab:,} ids, trained on the same text (tokenizer.json) |
| context | {length:,} tokens |
| trained on | {tokens:,} tokens, on one {device}, in {seconds:.0f} seconds |
| loss on held-out text | {loss:.4f} nats a token, over {loss_tokens:,} tokens |
| pruned share of blocks | {pruned:.1%}, over {pruned_tokens:,} tokens |
| retrain | `{command}`, then `python scripts/publish_pretrained.py --suite {suite} --run {name}` |

Loss and pruned share are those of the float32 weights that were trained. `make figure4 SUITE=pretrained`
measures this folder on your machine. Its text is in the public domain; the weights are under the licence
of the project.
"""


@command()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--suite", default="small", help="default: small")
    parser.add_argument("--run", default="pro-3m-4k-acp", help="default: pro-3m-4k-acp")
    parser.add_argument("--folder", type=Path, default=Path("pretrained"), help="default: pretrained")
    parser.add_argument("--about", default="", help="a line for the card on where the text is from")
    options = parser.parse_args(arguments)
    suite = load_suite(options.suite)
    run = suite.run(options.run)
    check_done(run)
    print(publish(suite, run, options.folder / run.name, options.about))
    return 0


def publish(suite: FoXSuite, run: FoXRun, folder: Path, about: str = "") -> Path:
    """Copies ``run`` into ``folder`` and returns it.

    Raises:
        RecordError: loss or pruned ratio is not measured.
        ValueError: the weights are larger than :data:`LARGEST_BYTES`.
    """
    card = _card(suite, run, f"{about}; " if about else "")
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(run.model_folder / "model.safetensors")
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    size = (folder / "model.safetensors").stat().st_size
    if size > LARGEST_BYTES:
        raise ValueError(f"{folder}: {size:,} bytes of weights, more than {LARGEST_BYTES:,}")
    (folder / "config.json").write_text((run.model_folder / "config.json").read_text())
    prepare(run.data).save_tokenizer(folder)
    done = json.loads((run.folder / "done.json").read_text())
    done["sha256"] = files.sha256_of(folder / "model.safetensors")
    files.write_json(folder / "done.json", done)
    (folder / "README.md").write_text(card)
    return folder


def _card(suite: FoXSuite, run: FoXRun, about: str) -> str:
    loss = read_records(suite, "loss", [run]).iloc[0]
    blocks = read_records(suite, "pruned_ratio", [run])
    done = json.loads((run.folder / "done.json").read_text())
    description = json.loads((run.folder / "run.json").read_text())
    corpus = prepare(run.data)
    config = run.model_config(corpus.vocab_size)
    return CARD.format(
        name=run.name,
        suite=suite.name,
        architecture=run.architecture,
        command=run.command,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_heads,
        head_dim=config.head_dim,
        parameters=config.num_parameters(),
        tolerance=run.log_pruning_tolerance,
        vocab=config.vocab_size,
        length=run.context_length,
        data=f"{about}`corpus: {run.data.corpus}`, {run.data.path or 'on every machine'}",
        tokens=done["tokens"],
        seconds=done["seconds"],
        device=description["device"],
        loss=loss["loss_nats"],
        loss_tokens=loss["measured_tokens"],
        pruned=blocks["pruned_blocks"].sum() / blocks["causal_blocks"].sum(),
        pruned_tokens=blocks["measured_tokens"].iloc[0],
    )


if __name__ == "__main__":
    run_command(main)
