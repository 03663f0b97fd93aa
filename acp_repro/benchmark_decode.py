"""Times a decoding step: ``python -m acp_repro.benchmark_decode [--shapes 16x65536 ...] [--suite NAME]``.

The command first times attention alone: one query token over a cache of random tokens, with and without ACP,
after a check against the equations in float64. The command then times a whole model with random parameters,
and the authors' model if it is installed: prefill, one step, and the memory of the cache. The table also
lists the lower bound: the time to read the required data once. On a GPU our code runs in bfloat16 as CUDA
graphs, and the level-2 cache is emptied before each call of the attention. On a CPU the dtype is float32,
with small sizes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .common.command import choose_device, command, described_parser, positive, run_command
from .pipeline.paper_registry import find_paper
from .pipeline.provenance import device_name
from .pipeline.records import write_suite_records
from .pipeline.suite_file import load_suite

SHAPES_GPU = ("1x16384", "16x8192", "16x16384", "64x16384", "16x65536")
SHAPES_CPU = ("1x1024", "1x4096", "4x4096")
BASELINES = ("official",)


@command(extra="pipeline")
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)

    import torch

    from .model import FoXConfig
    from .pipeline.benchmark.baselines import available
    from .pipeline.benchmark.decode import make_decode_problem, measure_attention, measure_model

    device = choose_device(options.device)
    suite = load_suite(options.suite) if options.suite else None
    paper = suite.paper if suite else find_paper("acp")
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    shape = {"vocab_size": 50_304} if gpu else {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2}
    config = FoXConfig.pro(**{"num_heads": 12 if gpu else 4, **shape})
    provenance = {"device": device_name(device), "dtype": str(dtype)[6:], "uses_gpu": gpu}
    metric = paper.metric("decode_time")
    shapes = options.shapes or (SHAPES_GPU if gpu else SHAPES_CPU)

    baselines = {}
    for name in BASELINES if gpu else ():
        call = available(name, device)
        print(f"{name}: {call}") if isinstance(call, str) else baselines.update({name: call})
    print(_HEADER)
    records = []

    def write() -> Path:
        rows = [dict.fromkeys(metric.columns) | one for one in records]
        return write_suite_records(suite and suite.name, paper, metric, rows, **provenance)

    for text in shapes:
        batch, length = map(int, text.split("x"))
        try:
            if "attention" in options.scopes:
                problem = make_decode_problem(
                    batch, length, config.num_heads, config.head_dim, options.gates, device, dtype
                )
                for one in measure_attention(problem, options.gates, options.repeats, baselines):
                    records.append(one)
                    print(_line(one))
                del problem
            if "model" in options.scopes:
                for one in measure_model(config, options.gates, batch, length, options.repeats, device):
                    records.append(one)
                    print(_line(one))
        finally:  # if a long table ends early, its records are kept
            if options.suite and records:
                write()
    print(f"\n{_LEGEND}")
    if options.suite:
        print(f"records: {write()}")
    return 0


_HEADER = (
    f"{'scope':9} {'batch x length':>14} {'':16} {'step ms':>8} {'reading':>8} {'over':>6} {'kept MiB':>9}"
    f" {'a layer':>9} {'taken':>9} {'peak':>9} {'prefill ms':>10} {'error':>8}"
)
_LEGEND = """Step: one token for each sequence. Reading: ms to read what is kept once, and a model's weights
too. Over: step over reading; 1 is ideal. MiB of the cache: kept; a layer: as much if all heads of a layer
kept what the head that keeps most does; taken: allocated. Peak: MiB of the GPU in a prefill. Error: against
float64."""


def _line(one: dict) -> str:
    def number(name: str, width: int, digits: int, scale: float = 1.0) -> str:
        value = one.get(name)
        return " " * width if value is None else f"{value / scale:{width}.{digits}f}"

    over = f"{one['step_ms'] / one['read_ms']:6.2f}" if "read_ms" in one else " " * 6
    return (
        f"{one['scope']:9} {one['batch']:>5} x {one['length_tokens']:>6} {one['implementation']:9} "
        f"{one['method']:6} {number('step_ms', 8, 4)} {number('read_ms', 8, 4)} {over} "
        f"{number('kept_bytes', 9, 1, 2**20)} {number('layer_kept_bytes', 9, 1, 2**20)} "
        f"{number('allocated_bytes', 9, 1, 2**20)} {number('peak_bytes', 9, 1, 2**20)} "
        f"{number('prefill_ms', 10, 1)} " + (f"{one['output_error']:8.1e}" if "output_error" in one else "")
    ).rstrip()


def _shape(text: str) -> str:
    batch, x, length = text.partition("x")
    if not (x and batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
        raise argparse.ArgumentTypeError(f"{text} is no BATCHxLENGTH, such as 16x65536")
    return text


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = described_parser("benchmark_decode", __doc__)
    add = parser.add_argument
    add(
        "--shapes",
        type=_shape,
        nargs="+",
        metavar="BATCHxLENGTH",
        help=f"default: {' '.join(SHAPES_GPU)} on a GPU, {' '.join(SHAPES_CPU)} on a CPU",
    )
    add(
        "--scopes",
        nargs="+",
        default=("attention", "model"),
        choices=("attention", "model"),
        help="default: both; a model is FoX (Pro) of 125M on a GPU, of two layers on a CPU",
    )
    add(
        "--gates",
        default="mixed",
        choices=("mixed", "local", "global", "one-global"),
        help="which heads are local: two thirds, all, none, all but one (default: %(default)s)",
    )
    add("--repeats", type=positive, default=20, metavar="N", help="default: %(default)s")
    add("--device", help="cpu, cuda (default: a GPU if there is one)")
    add(
        "--suite",
        metavar="NAME",
        help="write results/NAME/benchmark/decode_time.csv, for `make figure_decode SUITE=NAME`",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
