"""Shows which tokens a pruning autoencoder keeps: ``python -m acp_repro.lap.compress MODEL --text "..."``.

MODEL is the folder of a trained model, or a run folder such as runs/lap/NAME. Prints each text with its
dropped tokens marked; the first line explains the marks. A character of several tokens is marked if any of
them is dropped. Then it prints what each gate drops, and the text that the model writes from the kept tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from acp_repro.common.command import choose_device, command, described_parser, positive, run_command
from acp_repro.common.errors import UsageError


@command()
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    lines = _lines(options.file) if options.file else {}  # before the model, which takes seconds to load
    device = choose_device(options.device)
    from .autoencoder import PruningAutoencoder
    from .show import by_gate, legend, marked

    folder = options.model / "model" if (options.model / "model").is_dir() else options.model
    model = PruningAutoencoder.from_pretrained(folder, device)
    if model.tokenizer is None:
        raise UsageError(f"{folder}: holds no tokenizer.json; copy it there from where the model was trained")
    texts = options.text or list(lines.values())
    memory = model.encode_ids(model.token_ids(texts, list(lines)))
    written = model.decode(memory, options.max_length)
    terminal = sys.stdout.isatty()
    print(f"{legend(terminal)}\n")
    for row, text in enumerate(texts):
        kept, length = int(memory.kept[row]), int(memory.lengths[row])
        print(f"{marked(model, memory, row, terminal)}")
        print(f"  keeps {kept} of {length} tokens ({kept / length:.0%}), EOS among them")
        for name, tokens in by_gate(model, memory, row):
            print(f"  {name}: {' '.join(token.strip() or '␣' for token in tokens) or 'nothing'}")
        print(f"  written: {written[row]}")
        print(f"  {'the same text' if written[row] == text else 'not the same text'}\n")
    return 0


def _lines(path: Path) -> dict[str, str]:
    """The lines of a file that are not blank, by file and line number."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold other line breaks of Unicode
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); give a file with one text a line"
        ) from None
    except UnicodeDecodeError as error:
        number, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise UsageError(f"{path}:{number}: byte 0x{byte:02x} is not UTF-8; convert it to UTF-8") from None
    found = {f"{path}:{number}": line for number, line in enumerate(lines, 1) if line.strip()}
    if not found:
        raise UsageError(f"{path}: holds no text; give one text a line")
    return found


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = described_parser("lap.compress", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="a model's folder, or a run folder")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", action="append", help="a text (repeatable)")
    given.add_argument("--file", type=Path, metavar="FILE", help="a file with one text a line")
    add("--max-length", type=positive, metavar="N", help="write no more than N tokens (default: the model's)")
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
