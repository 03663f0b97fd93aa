"""Shows which tokens a pruning autoencoder keeps: ``python -m acp_repro.lap.compress MODEL --text "..."``.

MODEL is the folder of a trained model, or a run folder such as runs/lap/NAME. The command prints each text
with its dropped tokens marked; the first line explains the marks. A character that spans several tokens is
marked if any of them is dropped. The tokens that each gate drops follow, then the reconstructed text.
"""

from itertools import islice
from pathlib import Path

from acp_repro import lap
from acp_repro.common.command import choose_device, command, described_parser, positive, run_command
from acp_repro.common.errors import UsageError

LEGEND = "[word]2: a token that gate 2 dropped; the others are kept; a word may be several tokens"


@command(extra="lap")
def main(arguments: list[str] | None = None) -> int:
    parser = described_parser("lap.compress", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="a model's folder, or a run folder")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", action="append", help="a text (repeatable)")
    given.add_argument("--file", type=Path, metavar="FILE", help="a file with one text a line")
    add("--max-length", type=positive, metavar="N", help="write no more than N tokens (default: the model's)")
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    options = parser.parse_args(arguments)
    lines = _read_lines(options.file) if options.file else {}  # before the model, which takes seconds to load
    device = choose_device(options.device)
    folder = options.model / "model" if (options.model / "model").is_dir() else options.model
    model = lap.PruningAutoencoder.from_pretrained(folder, device)
    if model.tokenizer is None:
        raise UsageError(f"{folder}: no tokenizer.json; copy it from the folder of the model's training run")
    texts = options.text or list(lines.values())
    memory = model.encode_ids(model.token_ids(texts, list(lines)))
    written = model.decode(memory, options.max_length)
    print(f"{LEGEND}\n")
    for row, text in enumerate(texts):
        kept, length = int(memory.kept[row]), int(memory.lengths[row])
        print(mark_tokens(model, memory, row))
        print(f"  keeps {kept} of {length} tokens ({kept / length:.0%}), EOS among them")
        for name, tokens in group_by_gate(model, memory, row):
            print(f"  {name}: {' '.join(token.strip() or '␣' for token in tokens) or 'nothing'}")
        print(f"  written: {written[row]}")
        print(f"  {'the same text' if written[row] == text else 'not the same text'}\n")
    return 0


def _read_lines(path: Path) -> dict[str, str]:
    """The non-blank lines of a file, by file and line number."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may contain other Unicode line breaks
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read ({error}); give a UTF-8 file with one text per line"
        ) from None
    found = {f"{path}:{number}": line for number, line in enumerate(lines, 1) if line.strip()}
    if not found:
        raise UsageError(f"{path}: contains no text; write one text per line")
    return found


def mark_tokens(model: lap.PruningAutoencoder, memory: lap.Memory, row: int) -> str:
    """The tokens of one text: kept tokens plain, dropped tokens as ``[token]1`` with the 1-based gate.

    Tokens that share a character are marked together, with the first gate that dropped any of them.
    """
    length = int(memory.lengths[row]) - 1  # EOS is always kept
    ids = memory.input_ids[row, :length].tolist()
    parts = []
    assert model.tokenizer is not None
    gates = iter(memory.dropped_by[row].tolist())
    for token, count in model.tokenizer.characters(ids):
        gate = min((gate for gate in islice(gates, count) if gate >= 0), default=-1)
        space, word = (" ", token[1:]) if token.startswith(" ") else ("", token)
        parts.append(f"{space}{word}" if gate < 0 else f"{space}[{word}]{gate + 1}")
    return "".join(parts)


def group_by_gate(model: lap.PruningAutoencoder, memory: lap.Memory, row: int) -> list[tuple[str, list[str]]]:
    """(label, tokens): the tokens that each gate drops, then the kept ones with EOS, in text order."""
    length = int(memory.lengths[row])
    assert model.tokenizer is not None
    tokens = model.tokenizer.tokens(memory.input_ids[row, :length].tolist())
    gates = memory.dropped_by[row, :length].tolist()
    named = [(f"gate {gate + 1} drops", gate) for gate in range(memory.gates)] + [("kept", -1)]
    return [(name, [t for t, g in zip(tokens, gates, strict=True) if g == wanted]) for name, wanted in named]


if __name__ == "__main__":
    run_command(main)
