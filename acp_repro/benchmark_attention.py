"""Times forgetting attention and its baselines: ``python -m acp_repro.benchmark_attention``.

The inputs are random tokens and synthetic gates. The command first checks each kernel against the equations
in float64. A kernel that is wrong, or does not fit into memory, is not timed, and the table gives the reason.
The command writes results after every length, and replaces earlier results of the same measurement only. The
dtype is bfloat16 on a GPU, and float32 with small sizes on a CPU. --inference times the forward pass with
ACP, of this project and of the authors, at the 86 shapes of FlagAttention's benchmark. --nproc times context
parallelism on that many ranks, which exchange the keys that ACP keeps, or all keys.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

from .common.command import (
    aligned,
    choose_device,
    command,
    described_parser,
    output_file,
    positive,
    run_command,
)
from .pipeline.paper_registry import find_paper
from .pipeline.provenance import made_on
from .pipeline.records import write_suite_records
from .pipeline.suite_file import load_suite

NAMES = ("ours", "official", "fla", "flex", "fa4", "cudnn", "eager")


@command(extra="pipeline")
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.nproc > 1 and "RANK" not in os.environ:
        from .pipeline.training.distributed import launch_ranks

        words = sys.argv[1:] if arguments is None else arguments
        return launch_ranks(options.nproc, "acp_repro.benchmark_attention", words)

    import torch

    device = choose_device(options.device)
    suite = load_suite(options.suite) if options.suite else None
    paper = suite.paper if suite else find_paper("acp")
    name = "forward_time" if options.inference else "context_parallel" if options.nproc > 1 else "kernel_time"
    metric = paper.metric(name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    provenance = made_on(device) | {"dtype": str(dtype)[6:]}

    def write(records: list[dict]) -> list[Path]:
        paths = [options.csv] * bool(options.csv) + [None] * bool(options.suite)
        return [
            write_suite_records(suite and suite.name, paper, metric, records, path=path, **provenance)
            for path in paths
        ]

    if options.nproc > 1:
        return _time_ranks(options, dtype, write)
    if options.inference:
        from .pipeline.benchmark.forward import read_shapes, summary, time_forward

        records = list(time_forward(read_shapes(), device, options.repeats))
        print(summary(records))
    else:
        gates = options.gates or (suite.measure_settings.gate_distribution if suite else "mixed")
        records = _time_lengths(options, gates, device, dtype, write)
        print(f"\n{LEGEND}")
    for made in write(records):
        print(f"records: {made}")
    return 0


def _time_ranks(options, dtype, write: Callable[[list[dict]], object]) -> int:
    """The work of one rank under --nproc; rank 0 writes the records."""
    from .pipeline.benchmark import attention, context_parallel
    from .pipeline.training.distributed import context_group, on_rank_zero, process_group

    with process_group(options.device) as device:
        gpu = device.type == "cuda"
        group = context_group(options.nproc, device)
        heads, gates = options.heads or (12 if gpu else 4), options.gates or "mixed"
        records = []
        for length in options.context_lengths or ([65536] if gpu else [4096]):
            problem = attention.make_problem(length, heads, options.head_dim, gates, length, device, dtype)
            records += context_parallel.time_exchanges(problem, gates, group, options.repeats)
            on_rank_zero(functools.partial(write, records))
        on_rank_zero(functools.partial(print, context_parallel.table(records)))
    return 0


def _time_lengths(options, gates: str, device, dtype, write: Callable[[list[dict]], object]) -> list[dict]:
    from .pipeline.benchmark import attention, baselines

    gpu = device.type == "cuda"
    lengths = options.context_lengths or ([4096, 8192, 16384, 32768] if gpu else [512, 1024, 2048])
    found = {
        name: baselines.available(name, device) for name in ("ours", *options.baselines) if name in NAMES
    }
    calls = {name: call for name, call in found.items() if not isinstance(call, str)}
    for name, why in found.items():
        if name not in calls:
            print(f"{name}: {why}")
    records = []
    heads = options.heads or (12 if gpu else 4)
    for length in lengths:
        tokens = options.batch_tokens or (65536 if gpu else 1)
        problem = attention.make_problem(length, heads, options.head_dim, gates, tokens, device, dtype)
        print(
            f"\n{length} tokens, {problem.q.shape[0]} x {heads} heads of {options.head_dim}, "
            f"gates {gates}, {str(dtype)[6:]}"
        )
        found = []
        try:
            for one in attention.time_baselines(problem, gates, calls, options.repeats):
                print(f"  {one}") if isinstance(one, str) else found.append(one)
        finally:  # an interrupted table keeps its records
            records += found
            if records:
                write(records)
        print(table(found))
    return records


LEGEND = """Medians in ms. f: forward; f+b: forward + backward, boundary search included. TFLOP/s of f+b: of
the blocks that are computed; nominal, as if no block were pruned (the triangle of 2 + 5 products). dgate:
error of the gate gradient. --csv and --suite also write the times of the boundary search and of the host."""
_HEADER = ("", "", "f", "f+b", "pruned", "TFLOP/s", "nominal", "dgate")


def table(records: list[dict]) -> str:
    """The records as a table, one line per record."""
    rows = [_HEADER]
    for record in records:
        rate = record["nominal_forward_backward_tflop"] / (record["forward_backward_ms"] / 1e3)
        gate = record["gate_gradient_error"]
        rows.append(
            (
                record["implementation"],
                record["method"],
                f"{record['forward_ms']:.2f}",
                f"{record['forward_backward_ms']:.2f}",
                f"{record['pruned_ratio']:.3f}",
                f"{rate * (1 - record['pruned_ratio']):.4g}",
                f"{rate:.4g}",
                "" if gate is None else f"{100 * gate:.1f} %",
            )
        )
    return "\n".join(aligned(rows, left=(0, 1)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = described_parser("benchmark_attention", __doc__)
    add = parser.add_argument
    add(
        "--context-lengths",
        type=positive,
        nargs="+",
        metavar="N",
        help="tokens per sequence (default: 4096 8192 16384 32768 on a GPU, 512 1024 2048 on a CPU)",
    )
    add(
        "--inference",
        action="store_true",
        help="the forward pass with ACP at FlagAttention's 86 shapes; of the other options --repeats counts",
    )
    add(
        "--nproc",
        type=positive,
        default=1,
        metavar="N",
        help="ranks per sequence (default: 1); the length must be a multiple of 2 N whole blocks",
    )
    add("--heads", type=positive, metavar="N", help="default: 12 on a GPU, 4 on a CPU")
    add("--head-dim", type=positive, default=64, metavar="N", help="default: %(default)s")
    add(
        "--gates",
        choices=("mixed", "paper_ratio", "local", "global", "one-global"),
        help="which heads are local: two thirds, so many that 65 to 70 %% is pruned at every length, all, "
        "none, all but one (default: the suite's measure.gate_distribution, else mixed)",
    )
    add(
        "--batch-tokens",
        type=positive,
        metavar="N",
        help="tokens in a batch (default: 65536; on a CPU one sequence)",
    )
    add(
        "--baselines",
        nargs="*",
        default=NAMES[1:],
        choices=NAMES[1:],
        metavar="NAME",
        help=f"any of {', '.join(NAMES[1:])} (default: all that are installed)",
    )
    add("--repeats", type=positive, default=20, metavar="N", help="default: %(default)s")
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    add("--csv", type=output_file, metavar="FILE", help="CSV file of the results")
    add(
        "--suite",
        metavar="NAME",
        help="write results/NAME/benchmark/kernel_time.csv, for `make figure_kernel SUITE=NAME`",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
