"""Converts checkpoints for transformers, and back:
``python -m acp_repro.convert MODEL TARGET --to transformers``.

MODEL is a FoX checkpoint folder of the authors or of this project, or a run folder such as runs/cpu/NAME.
For ``--to official``, MODEL is a folder that transformers wrote. Tensors remain bitwise identical. After
``import acp_repro.hf``, transformers loads TARGET with ``AutoModelForCausalLM`` and ``AutoTokenizer``.
"""

import argparse
from pathlib import Path

from .common.command import CHECKPOINT, command, described_parser, run_command
from .common.errors import UsageError, usage_errors
from .explorer.checkpoint import Checkpoint


@command(extra="transformers")
def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    if options.target.resolve() == options.model.resolve():
        raise UsageError("MODEL and TARGET are the same folder; give another TARGET")
    if options.target.exists() and (options.target.is_file() or any(options.target.iterdir())):
        raise UsageError(f"TARGET {options.target} exists and is not empty; give a new folder, or delete it")
    Checkpoint(options.model)  # before torch is imported
    from .hf import conversion

    with usage_errors():
        if options.to == "official":
            conversion.to_official(options.model, options.target)
        else:
            conversion.to_transformers(options.model, options.target, longcrawl64=options.longcrawl64)
    print(f"wrote {options.target}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = described_parser("convert", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help=CHECKPOINT)
    add("target", metavar="TARGET", type=Path, help="the folder to write: new, or empty")
    add("--to", choices=("transformers", "official"), required=True, help="the format of TARGET")
    add(
        "--longcrawl64",
        action="store_true",
        help="the model was trained on LongCrawl64: its tokenizer is GPT-2's, of JSON-escaped text",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
