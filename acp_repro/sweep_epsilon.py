"""Sweeps epsilon, for savings and loss: ``python -m acp_repro.sweep_epsilon [MODEL | --suite NAME]``.

MODEL is a FoX checkpoint folder in the authors' format, or a run folder such as runs/cpu/NAME. For each
epsilon the command prints the pruned ratio (at block level and at token level), the loss, and the
largest attention weight that a row loses. Epsilon bounds that weight (Appendix A). With --suite the command
writes the same numbers as results of the suite, like ``python -m acp_repro.measure epsilon_sweep``.
"""

import argparse
import math

from . import measure
from .common import files
from .common.command import (
    DEFAULT_CONTEXT_LENGTH,
    add_text_options,
    aligned,
    bounded,
    checkpoint_parser,
    choose_device,
    command,
    output_file,
    positive,
    run_command,
)
from .common.errors import UsageError
from .explorer.checkpoint import Checkpoint
from .model.config import LogEpsilon
from .papers.acp.schema import SWEPT_LOG_PRUNING_TOLERANCES
from .pipeline.data.sources import check_length
from .pipeline.provenance import made_on, origin

GPU_TOKENS, CPU_TOKENS = 32_768, 4096
_HEADER = (
    "log epsilon",
    "blocks pruned",
    "entries pruned",
    "loss (nats)",
    "largest pruned mass",
    "bound epsilon",
)


@command(extra="pipeline")
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.suite:
        device = ["--device", options.device] if options.device else []
        return measure.main(["epsilon_sweep", "--suite", options.suite, *device])
    opened = Checkpoint(options.model)  # before torch is imported
    length = options.context_length or opened.context_length or DEFAULT_CONTEXT_LENGTH
    check_length(options.text, length)
    device = choose_device(options.device)
    if opened.config.use_rope:
        raise UsageError(f"{opened.folder} has no forget gate to prune by; pass a FoX model without RoPE")

    from .papers.acp.measure.pruned_ratio import PassSettings, measure_epsilon_sweep
    from .pipeline.data.text_checkpoint import TextCheckpoint, labelled_batches

    checkpoint = TextCheckpoint(options.model)
    print(f"text: {checkpoint.source(options.text, options.token_ids)}")
    tokens = max(length, options.tokens or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS))
    ids = checkpoint.input_ids(length, tokens, text=options.text, token_ids=options.token_ids)
    settings = PassSettings(checkpoint.autocast_dtype(device), str(checkpoint.folder))
    rows = measure_epsilon_sweep(
        checkpoint.load(device), labelled_batches(ids, device), settings, options.log_pruning_tolerance
    )
    if options.csv:
        source = {
            "checkpoint": str(checkpoint.folder),
            "text": str(options.token_ids or options.text or "held-out"),
            "context_length_tokens": length,
            **origin(dtype=settings.dtype, **made_on(device)),
        }
        table = [row | source for row in rows]
        print(files.write_csv(options.csv, list(table[0]), (row.values() for row in table)))
    print(_table(rows))
    return 0


def _table(rows: list[dict]) -> str:
    """The records of ``epsilon_sweep`` as aligned text; the mass is ``-`` if nothing was pruned."""
    lines = [_HEADER]
    for row in rows:
        value, mass = row["swept_log_pruning_tolerance"], row["largest_pruned_mass"]
        lines.append(
            (
                f"{value:g}",
                f"{100 * row['block_pruned_ratio']:.1f} %",
                f"{100 * row['token_pruned_ratio']:.1f} %",
                f"{row['loss_nats']:.5f}",
                "-" if mass is None else f"{mass:.1e}",
                f"{math.exp(value):.1e}",
            )
        )
    return "\n".join(aligned(lines))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = checkpoint_parser("sweep_epsilon", __doc__)
    add = parser.add_argument
    add(
        "--log-pruning-tolerance",
        type=bounded(LogEpsilon),
        nargs="+",
        default=SWEPT_LOG_PRUNING_TOLERANCES,
        metavar="X",
        help="log epsilon, one or more (default: -1 -5 -10 -20 -40)",
    )
    add_text_options(parser)
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"read at most this many tokens (default: {GPU_TOKENS} on a GPU; {CPU_TOKENS} on a CPU, about "
        "half a minute)",
    )
    add(
        "--suite",
        metavar="NAME",
        help="write results/NAME/RUN/epsilon_sweep.csv of the suite's sweep run; of the other "
        "options only --device applies",
    )
    add("--csv", type=output_file, metavar="FILE", help="also write the result to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
