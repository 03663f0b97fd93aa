"""Publishes a trained run of any paper in pretrained/, with a model card that describes its training.

    python scripts/publish.py --suite small --run pro-13m-4k-acp
    python scripts/publish.py --suite lap-english --run exact-1 --name lap-0.6m
    python scripts/publish.py --suite retention --run stdlib-tiny-ar-30-input --name ar-tiny-stdlib

Writes pretrained/NAME: config.json, model.safetensors, tokenizer.json and README.md, the model card; for ACP
also done.json, so that suite `pretrained` finds the model, and for Adaptive Retention classes.json. Weights
are stored in bfloat16, at half the size, except those of LAP, which keep their dtype. The run must be trained
and the card's results measured: `loss` and `pruned_ratio`, `reconstruction`, or `score` of the run and of a
dense run of the same task and seed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from acp_repro.common import artifacts, files
from acp_repro.common.command import command, run_command
from acp_repro.pipeline.paper import Suite
from acp_repro.pipeline.records import read_records
from acp_repro.pipeline.run import Run
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.pipeline.training.run_folder import TrainingError, check_done

LARGEST_BYTES = 30_000_000  # limit on the download size of a clone

# Front matter for the Hugging Face Hub: the language, tags and data description of each paper.
FRONT = {
    "acp": ("en", "forgetting-transformer, pruning, text-generation", "English books in the public domain"),
    "retention": ("code", "adaptive-retention, text-classification", "the Python standard library"),
    "lap": (
        "en",
        "learnable-attention-pruning, autoencoder, t5",
        "short sentences of Python's documentation and a novel",
    ),
}

CARD = """---
license: apache-2.0
language: {language}
library_name: acp_repro
tags: [{tags}]
datasets: [{data}]
---

# {name}

{about}

| property | value |
|---|---|
{rows}

{end}
"""


@command()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--suite", required=True, help="suite that trained the run")
    parser.add_argument("--run", required=True, help="name of the run in the suite")
    parser.add_argument("--name", help="name of the new folder (default: the run's)")
    parser.add_argument("--folder", type=Path, default=Path("pretrained"), help="default: pretrained")
    parser.add_argument("--data", default="", help="source of the training text, for the model card")
    options = parser.parse_args(arguments)
    suite = load_suite(options.suite)
    run = suite.run(options.run)
    check_done(run)
    print(publish(suite, run, options.folder / (options.name or run.name), options.data))
    return 0


def publish(suite: Suite, run: Run, folder: Path, data: str = "") -> Path:
    """Copies ``run`` into ``folder`` atomically, and returns the folder.

    Raises:
        RecordError: a result on the card is not measured.
        TrainingError: the weights are larger than :data:`LARGEST_BYTES`, or a dense run is missing.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
        made = Path(beside) / folder.name
        made.mkdir()
        about, rows, end = KINDS[suite.paper.name](suite, run, made)
        size = (made / "model.safetensors").stat().st_size
        if size > LARGEST_BYTES:
            raise TrainingError(f"{run.model_folder}: {size:,} bytes of weights, more than {LARGEST_BYTES:,}")
        if data:
            rows["data"] = f"{data}; {rows['data']}"
        done, described = (json.loads((run.folder / n).read_text()) for n in ("done.json", "run.json"))
        rows["trained on"] = rows["trained on"].format(device=described["device"], **done)
        name = "" if folder.name == run.name else f" --name {folder.name}"
        again = f"python scripts/publish.py --suite {suite.name} --run {run.name}{name}"
        rows["retrain"] = f"`{run.command}`, then `{again}`"
        lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        front = dict(zip(("language", "tags", "data"), FRONT[suite.paper.name], strict=True))
        (made / "README.md").write_text(
            CARD.format(name=folder.name, about=about, rows=lines, end=end, **front)
        )
        if folder.exists():
            folder.rename(Path(beside) / "before")
        made.rename(folder)
    return folder


def fox(suite: Suite, run: Run, folder: Path) -> tuple[str, dict[str, str], str]:
    """Writes an ACP model; returns the card's introduction, table rows and closing paragraphs."""
    from acp_repro.pipeline.data import prepare

    loss = read_records(suite, "loss", [run]).iloc[0]
    blocks = read_records(suite, "pruned_ratio", [run])
    weights = load_file(run.model_folder / "model.safetensors")
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    corpus = prepare(run.data)
    corpus.save_tokenizer(folder)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), corpus.bos_id)
    official = json.loads((run.model_folder / "config.json").read_text()) | ends
    files.write_json(folder / "config.json", dict(sorted(official.items())))
    done = artifacts.open_or_explain(run.weights_file, manifest=run.folder / "done.json")
    artifacts.write_manifest(folder / "done.json", folder / "model.safetensors", done.get("inputs", {}), done)
    config = run.model_config(corpus.vocab_size)
    about = f"""\
A small Forgetting Transformer (FoX), trained with Adaptive Computation Pruning (ACP). Use this model to
explore attention heads. As in large models, some heads are local (nearly all of their blocks are pruned) and
some are global (nearly none).

    python -m acp_repro.inspect pretrained/{folder.name}"""
    pruned = blocks["pruned_blocks"].sum() / blocks["causal_blocks"].sum()
    rows = {
        "model": f"FoX ({run.architecture}): {config.num_hidden_layers} layers of width "
        f"{config.hidden_size}, {config.num_heads} heads of {config.head_dim}",
        "parameters": f"{config.num_parameters():,} without the input embedding, in bfloat16",
        "pruning": f"log epsilon = {run.log_pruning_tolerance:g}",
        "data": f"`corpus: {run.data.corpus}`, {run.data.path or 'on every machine'}",
        "tokenizer": f"byte-pair encoding of {config.vocab_size:,} ids, trained on the same text "
        "(tokenizer.json)",
        "context": f"{run.context_length:,} tokens",
        "trained on": "{tokens:,} tokens, on one {device}, in {seconds:.0f} seconds",
        "held-out loss": f"{loss['loss_nats']:.4f} nats per token, over {loss['measured_tokens']:,} tokens",
        "pruned blocks": f"{pruned:.1%} on the GPU's grid, over {blocks['measured_tokens'].iloc[0]:,} tokens",
    }
    end = """\
The loss and the pruned blocks were measured with the float32 parameters, as trained. `make figure4
SUITE=pretrained` measures the parameters of this folder on your machine.

The training text is in the public domain. The parameters are under the licence of the project."""
    return about, rows, end


def encoder(suite: Suite, run: Run, folder: Path) -> tuple[str, dict[str, str], str]:
    """Writes an encoder with gates; returns the same parts of the card as :func:`fox`."""
    from acp_repro.papers.retention.task import load_model

    dense = [r for r in suite.dense if (r.dataset_name, r.seed) == (run.dataset_name, run.seed)]
    if not dense:
        raise TrainingError(f"{run.name}: no dense run of its task and seed in suite {suite.name}")
    scores = read_records(suite, "score", [run, dense[0]])
    tested = scores[scores["split"] == "test"].groupby("run").first()  # the first metric
    ours, whole = tested.loc[run.name], tested.loc[dense[0].name]
    model = load_model(run.model_folder).to(torch.bfloat16)
    model.save_pretrained(folder)
    for file in run.model_folder.iterdir():
        if file.name.startswith("tokenizer") or file.name == "classes.json":
            shutil.copyfile(file, folder / file.name)
    classes = ", ".join(json.loads((run.model_folder / "classes.json").read_text()))
    place = "at the input" if run.gates == "input" else run.gates.replace("_", " ")
    about = f"""\
A small encoder with [Adaptive Retention](../../docs/adaptive-retention.md). The encoder classifies which
package of the Python standard library a piece of code comes from. A gate {place} keeps at most
{run.budget:.0%} of the tokens. Use this model to see which tokens are kept:

    python -m acp_repro.retention.show pretrained/{folder.name} --file acp_repro/common/files.py"""
    rows = {
        "model": f"{run.backbone.num_hidden_layers} blocks of width {run.backbone.hidden_size}",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}, in bfloat16",
        "data": f"pieces of {run.dataset.options.get('characters', 600)} characters of {classes}; the "
        "package's name is removed from the text",
        "tokenizer": f"byte-pair encoding of {model.config.vocab_size:,} ids, trained on the same text",
        "maximum length": f"{run.dataset.max_tokens} tokens",
        f"accuracy on {ours['measured_examples']:,} test pieces": f"{ours['score_percent']:.1f} % with "
        f"{ours['keep_ratio']:.0%} of the tokens; a dense model has {whole['score_percent']:.1f} %",
        "trained on": "{tokens:,} tokens, on {device}, in {seconds:.0f} seconds",
    }
    end = """\
The scores are of one training run, measured with its float32 parameters.

The text of the standard library is under Python's licence. The parameters are under the licence of the
project."""
    return about, rows, end


def autoencoder(suite: Suite, run: Run, folder: Path) -> tuple[str, dict[str, str], str]:
    """Writes a pruning autoencoder; returns the same parts of the card as :func:`fox`."""
    scores = read_records(suite, "reconstruction", [run]).set_index("decoding")
    removed, free = scores.loc["removed"], scores.loc["free"]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copyfile(run.model_folder / name, folder / name)
    described = json.loads((run.folder / "run.json").read_text())
    settings, data, blocks = run.pruning_config(), run.data, run.model.num_layers
    gates = " and ".join(map(str, settings.gated_blocks(blocks)))
    command = f"python -m acp_repro.lap.compress pretrained/{folder.name}"
    about = f"""\
A small autoencoder with [Learnable Attention Pruning](../../docs/learnable-attention-pruning.md) (LAP). The
encoder drops tokens of a sentence, and the decoder reconstructs the sentence from the remaining tokens. Use
this model to see which tokens are kept. It was trained only on short sentences, so it reconstructs other
text with errors.

    {command} --text "Return the number of items in the list.\""""
    texts = f"{described['data']['train_texts']:,} texts of `corpus: {data.corpus}`"
    if "shortest" in data.function.options:
        texts += f", {data.function.called}, of {data.shortest} to {data.longest} characters"
    rows = {
        "model": f"a T5 of {blocks} encoder and {run.model.num_decoder_layers} decoder blocks of width "
        f"{run.model.d_model}, trained from scratch",
        "parameters": f"{described['parameters']:,}, in float32",
        "gates": f"hard concrete, after encoder blocks {gates} (counted from 0)",
        "decoder": f"reads the {settings.decoder_window} previous tokens and the kept tokens",
        "data": texts,
        "tokenizer": f"byte-pair encoding of {data.vocabulary:,} ids, trained on the same text "
        "(tokenizer.json)",
        "maximum length": f"{settings.max_length} tokens, including EOS",
        "trained for": f"{run.training.steps:,} steps of {run.training.batch_texts} texts, "
        f"lambda {run.compression:g}",
        "trained on": "{device}, in {seconds:.0f} seconds",
        "tokens kept": f"{removed['keep_ratio']:.1%}; the rest are removed, not masked",
        "accuracy, teacher-forced": f"{removed['token_accuracy']:.3f}",
        "BLEU, ROUGE-L, teacher-forced": f"{removed['bleu']:.3f}, {removed['rouge_l']:.3f}",
        "exact match, free-running": f"{free['exact_match']:.1%}",
    }
    end = f"""\
The scores are of {removed["measured_texts"]} held-out sentences. `make table_scores SUITE={suite.name}`
retrains and scores the models of the suite.

Sentences of the standard library are under Python's licence. The novel is in the public domain. The
parameters are under the licence of the project."""
    return about, rows, end


KINDS = {"acp": fox, "retention": encoder, "lap": autoencoder}

if __name__ == "__main__":
    run_command(main)
