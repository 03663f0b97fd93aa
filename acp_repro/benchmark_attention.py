"""Times forgetting attention and its rivals: ``python -m acp_repro.benchmark_attention [--lengths N ...]``.

Tokens and gates are random. Each kernel is first checked against the equations in float64. One that is wrong,
or does not fit into memory, gets a line with the reason and no record. Records are written after every
length. They replace those of the same measurement; all others stay. It runs in bfloat16 on a GPU, and in
float32 and at small sizes on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .common.command import choose_device, command, described_parser, output_file, positive, run_command
from .common.errors import is_out_of_memory
from .pipeline.benchmark.table import LEGEND, table
from .pipeline.provenance import device_name
from .pipeline.records import keep_other_machines, write_suite_records
from .pipeline.registry import find_paper
from .pipeline.suite import load_suite

NAMES = ("ours", "official", "fla", "flex", "fa4", "cudnn", "eager")


@command(extra="chain")
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)

    import torch

    from .pipeline.benchmark.attention import give_memory_back, make_problem, measure, why_not
    from .pipeline.benchmark.rivals import available

    device = choose_device(options.device)
    suite = load_suite(options.suite) if options.suite else None
    paper = suite.paper if suite else find_paper("acp")
    gates = options.gates or (suite.measure_settings.gates if suite else "bimodal")
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    lengths = options.lengths or ([4096, 8192, 16384, 32768] if gpu else [512, 1024, 2048])
    rivals = {name: available(name, device) for name in ("ours", *options.rivals) if name in NAMES}
    calls = {name: call for name, call in rivals.items() if not isinstance(call, str)}
    for name, why in rivals.items():
        if name not in calls:
            print(f"{name}: {why}")
    records = []
    quantity = paper.quantity("kernel_time")
    provenance = {"device": device_name(device), "dtype": str(dtype)[6:], "uses_gpu": gpu}
    heads = options.heads or (12 if gpu else 4)

    if suite:
        planned = {"length_tokens": lengths, "heads": [heads], "head_dim": [options.head_dim]}
        keep_other_machines(suite, quantity, provenance["device"], planned)

    def write() -> list[Path]:
        paths = [options.csv] * bool(options.csv) + [None] * bool(options.suite)
        return [
            write_suite_records(suite and suite.name, paper, quantity, records, path=path, **provenance)
            for path in paths
        ]

    for length in lengths:
        tokens = options.tokens or (65536 if gpu else 1)
        try:
            problem = make_problem(length, heads, options.head_dim, gates, tokens, device, dtype)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            print(f"\n{length} tokens: {why_not(error)}")
            give_memory_back()
            continue
        print(
            f"\n{length} tokens, {problem.q.shape[0]} x {heads} heads of {options.head_dim}, "
            f"gates {gates}, {str(dtype)[6:]}"
        )
        found = []
        try:
            for one in measure(problem, gates, calls, options.repeats):
                print(f"  {one}") if isinstance(one, str) else found.append(one)
        finally:  # if a long table ends early, its records are kept
            records += found
            if records:
                write()
        print(table(found))
    print(f"\n{LEGEND}")
    for made in write():
        print(f"records: {made}")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = described_parser("benchmark_attention", __doc__)
    add = parser.add_argument
    add(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="N",
        help="tokens a sequence (default: 4096 8192 16384 32768 on a GPU, 512 1024 2048 on a CPU)",
    )
    add("--heads", type=positive, metavar="N", help="default: 12 on a GPU, 4 on a CPU")
    add("--head-dim", type=positive, default=64, metavar="N", help="default: %(default)s")
    add(
        "--gates",
        choices=("bimodal", "paper", "local", "global", "one-global"),
        help="which heads are local: two thirds, so many that 65 to 70 %% is pruned at every length, all, "
        "none, all but one (default: the suite's measure.gates, else bimodal)",
    )
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help="tokens in a batch (default: 65536; on a CPU one sequence)",
    )
    add(
        "--rivals",
        nargs="*",
        default=NAMES[1:],
        choices=NAMES[1:],
        metavar="NAME",
        help=f"any of {', '.join(NAMES[1:])} (default: all that are installed)",
    )
    add("--repeats", type=positive, default=20, metavar="N", help="default: %(default)s")
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    add("--csv", type=output_file, metavar="FILE", help="write the records there")
    add(
        "--suite",
        metavar="NAME",
        help="write results/NAME/benchmark/kernel_time.csv, for `make figure_kernel SUITE=NAME`",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
