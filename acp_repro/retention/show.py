"""Shows which tokens a model with gates keeps: ``python -m acp_repro.retention.show MODEL --text "..."``.

MODEL is a ``save_pretrained`` folder with its tokeniser, or a run folder such as runs/retention/NAME. The
command prints the text once per gate, with a dot for each character of a dropped token.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from acp_repro.common.bounds import Share
from acp_repro.common.command import bounded, command, described_parser, run_command
from acp_repro.common.errors import UsageError, usage_errors

DOT = "·"


def visible(text: str, offsets: Sequence[tuple[int, int]], kept: Sequence[bool]) -> str:
    """``text`` with a dot for each character outside the kept tokens; line breaks are kept.

    Args:
        offsets: (start, end) characters of each token.
        kept: whether each token is kept.
    """
    dots = [c if c == "\n" else DOT for c in text]
    shown = dots.copy()
    # Dropped tokens last, because several tokens may share a character.
    for keep, (start, end) in sorted(zip(kept, offsets, strict=True), reverse=True):
        shown[start:end] = (text if keep else dots)[start:end]
    return "".join(shown)


def show_kept(folder: Path, text: str, question: str = "", budget: float | None = None) -> list[str]:
    """The lines that the command prints.

    Args:
        folder: a ``save_pretrained`` folder, or a run folder.
        question: the question before the text, for question-answering models.
        budget: a share that replaces the model's budget.

    Raises:
        UsageError: the folder has no model with gates, or no ``tokenizer.json``.
    """
    import torch
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    from . import from_pretrained
    from .encoders import position_limit

    logging.disable_progress_bar()
    folder = folder / "model" if (folder / "model/config.json").is_file() else folder
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UsageError(f"{folder}: has no {name}; give a folder of save_pretrained, or of a run")
    with usage_errors():
        model = from_pretrained(folder, dtype=torch.float32).eval()  # CPUs are slow in bfloat16
        if budget is not None:
            model.retention.configure(budget=budget)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except ValueError as error:
        raise UsageError(f"{folder}/tokenizer.json cannot be read: {error}") from None
    pair = (question, text) if question else (text,)
    limit = {"truncation": "longest_first" if question else True, "max_length": position_limit(model.config)}
    encoded = tokenizer(
        *pair, return_offsets_mapping=True, return_tensors="pt", split_special_tokens=True, **limit
    )
    offsets = encoded.pop("offset_mapping")[0].tolist()
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad(), model.retention.recorded() as records:
        output = model(**inputs)
    total, parts = len(offsets), encoded.sequence_ids(0)
    spans = [tuple(o) if part == len(pair) - 1 else (0, 0) for o, part in zip(offsets, parts, strict=True)]
    end = max(last for _, last in spans)
    config = model.retention.config
    lines = [f"{total} tokens, {config.method}, budget {config.budget:.0%}"]
    if end < len(text.rstrip()):
        lines.append(f"only the first {end} of {len(text)} characters fit the model")
    for record in records:
        kept = record.kept[0].tolist()
        place = f"after block {record.place}" if record.place else "at the input"
        lines += ["", f"{place}: {sum(kept)} of {total} tokens kept"]
        lines += visible(text[:end], spans, kept).splitlines()
    if not records:
        lines += ["", "nothing is dropped"]
    names = folder / "classes.json"
    if names.is_file() and getattr(output, "logits", None) is not None:
        classes = json.loads(names.read_text())
        share = output.logits[0].float().softmax(-1)
        kinds = f"{len(classes)} {getattr(model.config, 'classes_are', 'classes')}: {', '.join(classes)}"
        lines += ["", f"answer: {classes[int(share.argmax())]} ({float(share.max()):.0%}), of {kinds}"]
    return lines


@command(extra="retention")
def main(arguments: list[str] | None = None) -> int:
    parser = described_parser("retention.show", __doc__)
    add = parser.add_argument
    add("model", type=Path, help="folder of a model with gates, or of a run")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="the text itself")
    source.add_argument("--file", type=Path, help="a file with the text")
    add("--question", default="", help="the question, for a model that answers questions about the text")
    add("--budget", type=bounded(Share), help="share of the tokens to keep (default: the model's own)")
    options = parser.parse_args(arguments)
    try:
        text = options.text if options.file is None else options.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--file {options.file}: cannot be read ({error}); give a UTF-8 file") from None
    if not text.strip():
        raise UsageError("the text is empty; give a text with --text or --file")
    print("\n".join(show_kept(options.model, text, options.question, options.budget)), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
