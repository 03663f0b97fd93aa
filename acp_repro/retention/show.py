"""Shows which tokens a model with gates keeps: ``python -m acp_repro.retention.show MODEL --text "..."``.

MODEL is a folder of ``save_pretrained`` with its tokeniser, or a run's folder such as runs/retention/NAME.
Prints the text once for each gate. Every character of a token that the gate drops is a dot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from acp_repro.common.bounds import Share
from acp_repro.common.command import bounded, command, plain, run_command
from acp_repro.common.errors import UsageError

DOT = "·"


def visible(text: str, offsets: Sequence[tuple[int, int]], kept: Sequence[bool]) -> str:
    """``text`` with a dot for each character of a dropped token, or of none; line ends stay.

    Args:
        offsets: (start, end) characters of each token.
        kept: whether each token is kept.
    """
    dots = [c if c == "\n" else DOT for c in text]
    shown = dots.copy()
    # Dropped ones last: a character may have several tokens.
    for keep, (start, end) in sorted(zip(kept, offsets, strict=True), reverse=True):
        shown[start:end] = (text if keep else dots)[start:end]
    return "".join(shown)


def place_name(place: int) -> str:
    """ "at the input", "after block 2"."""
    return "at the input" if place == 0 else f"after block {place}"


def find_model(path: Path) -> Path:
    """The folder with ``config.json``: ``path`` itself, or ``model`` in a run's folder.

    Raises:
        UsageError: there is none.
    """
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise UsageError(f"{path}: no config.json there; give a folder of save_pretrained, or a run's folder")


def show(folder: Path, text: str, question: str = "", budget: float | None = None) -> list[str]:
    """The lines that the command prints.

    Args:
        question: read before the text, by models that were trained so.
        budget: another share than the model's own.

    Raises:
        UsageError: the folder holds no model with gates, or no fast tokeniser.
    """
    import torch
    from safetensors import SafetensorError
    from transformers.utils import logging

    from . import from_pretrained

    logging.disable_progress_bar()

    _check_gates(folder)
    try:
        model = from_pretrained(folder, dtype=torch.float32).eval()  # a CPU is slow in bfloat16
        if budget is not None:
            model.retention.configure(budget=budget)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except (OSError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"{folder}: its weights cannot be read ({reason}); copy the folder again") from None
    tokenizer = _tokenizer(folder)
    pair = (question, text) if question else (text,)
    limit = {"truncation": "longest_first" if question else True, "max_length": _longest(model)}
    encoded = tokenizer(
        *pair, return_offsets_mapping=True, return_tensors="pt", split_special_tokens=True, **limit
    )
    offsets = encoded.pop("offset_mapping")[0].tolist()
    inside = [part == len(pair) - 1 for part in encoded.sequence_ids(0)]
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad(), model.retention.recorded() as records:
        output = model(**inputs)
    total = len(offsets)
    spans = [tuple(o) if i else (0, 0) for o, i in zip(offsets, inside, strict=True)]
    end = max(last for _, last in spans)
    lines = [f"{total} tokens, {model.retention.config.method}, budget {model.retention.config.budget:.0%}"]
    if end < len(text.rstrip()):
        lines.append(f"only the first {end} of {len(text)} characters fit the model")
    for record in records:
        kept = record.kept[0].tolist()
        lines += ["", f"{place_name(record.place)}: {sum(kept)} of {total} tokens go on"]
        lines += visible(text[:end], spans, kept).splitlines()
    if not records:
        lines += ["", "nothing is dropped"]
    names = folder / "classes.json"
    if names.is_file() and getattr(output, "logits", None) is not None:
        classes = json.loads(names.read_text())
        share = output.logits[0].float().softmax(-1)
        if len(classes) == len(share):
            of = f"{len(classes)} {getattr(model.config, 'classes_are', 'classes')}: {', '.join(classes)}"
            lines += ["", f"answer: {classes[int(share.argmax())]} ({float(share.max()):.0%}), of {of}"]
    return lines


def _check_gates(folder: Path) -> None:
    """Checks that the folder holds a model with gates.

    Raises:
        UsageError: the config is damaged, or the model has no gates.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{folder}/config.json: cannot be read ({error}); copy it again") from None
    config = config if isinstance(config, dict) else {}
    if "retention" not in config:
        kind = config.get("model_type", "another model")
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no run, or one of another paper
            kind += f" of method {json.loads((folder.parent / 'run.json').read_text())['settings']['method']}"
        raise UsageError(
            f"{folder}: a checkpoint of {kind} without gates; give a run of a method with gates, such as ar, "
            "or an encoder that acp_repro.retention.retain gave gates"
        )


def _longest(model) -> int:
    """The most tokens that the model reads; RoBERTa and Longformer reserve two positions."""
    positions = model.config.max_position_embeddings
    return positions - 2 if model.config.model_type in ("roberta", "longformer", "camembert") else positions


def _tokenizer(folder: Path):
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{folder}: no tokenizer.json; save the model's fast tokenizer there")
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the library tokenizers has no class of error of its own
        raise UsageError(f"{folder}/tokenizer.json is damaged ({error}); copy the folder again") from error


@command(extra="retention")
def main(arguments: list[str] | None = None) -> int:
    summary, details = __doc__.split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m acp_repro.retention.show", description=plain(summary.split(":")[0] + ". " + details)
    )
    parser.add_argument("model", type=Path, help="folder of a model with gates, or of a run")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="the text itself")
    source.add_argument("--file", type=Path, help="a file with the text")
    parser.add_argument(
        "--question", default="", help="the question, for a model that answers questions about the text"
    )
    parser.add_argument(
        "--budget", type=bounded(Share), help="share of the tokens to keep (default: the model's own)"
    )
    options = parser.parse_args(arguments)
    if options.budget == 0:
        parser.error("argument --budget: must be above 0")
    try:
        text = options.text if options.file is None else options.file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--file {options.file}: cannot be read ({error.strerror}); give a file of text, or use --text"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"--file {options.file}: is not text in UTF-8; convert it") from None
    if not text.strip():
        raise UsageError("the text is empty; give some with --text or --file")
    print("\n".join(show(find_model(options.model), text, options.question, options.budget)), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
