"""Times a decoding step: ``python -m acp_repro.benchmark_decode [--shapes 16x65536 ...] [--suite NAME]``.

The command first times attention alone: one query token over a cache of random tokens, with and without ACP,
after a check against the equations in float64. The command then times a whole model with random parameters,
and the authors' model if it is installed: prefill, one step, and the memory of the cache. The table also
lists the lower bound: the time to read the required data once. On a GPU our code runs in bfloat16 as CUDA
graphs, and the level-2 cache is emptied before each call of the attention. On a CPU the dtype is float32,
with small sizes.
"""

import argparse
from pathlib import Path

from .common.command import aligned, choose_device, command, described_parser, positive, run_command
from .pipeline.paper_registry import find_paper
from .pipeline.provenance import made_on
from .pipeline.records import write_suite_records
from .pipeline.suite_file import load_suite

SHAPES_GPU = ("1x16384", "16x8192", "16x16384", "64x16384", "16x65536")
SHAPES_CPU = ("1x1024", "1x4096", "4x4096")
BASELINES = ("official",)


@command(extra="pipeline")
def main(arguments: list[str] | None = None) -> None:
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
    provenance = made_on(device) | {"dtype": str(dtype)[6:]}
    metric = paper.metric("decode_time")
    shapes = options.shapes or (SHAPES_GPU if gpu else SHAPES_CPU)

    baselines = {}
    for name in BASELINES if gpu else ():
        call = available(name, device)
        print(f"{name}: {call}") if isinstance(call, str) else baselines.update({name: call})
    records = []

    def write() -> Path:
        rows = [dict.fromkeys(metric.columns) | one for one in records]
        return write_suite_records(suite and suite.name, paper, metric, rows, **provenance)

    for text in shapes:
        (batch, length), before = map(int, text.split("x")), len(records)
        shape = (batch, length, config.num_heads, config.head_dim)
        try:
            problem = make_decode_problem(*shape, options.gates, device, dtype)
            records += measure_attention(problem, options.gates, options.repeats, baselines)
            del problem  # frees its memory
            records += measure_model(config, options.gates, batch, length, options.repeats, device)
        finally:  # an interrupted table keeps its records
            if options.suite and records:
                write()
        print(_table(records[before:]))
    print(f"\n{_LEGEND}")
    if options.suite:
        print(f"records: {write()}")


_COLUMNS = (  # the columns of the table: title, column of the records, unit, and decimals
    ("step ms", "step_ms", 1, 4),
    ("reading ms", "read_ms", 1, 4),
    ("kept MiB", "kept_bytes", 2**20, 1),
    ("a layer MiB", "layer_kept_bytes", 2**20, 1),
    ("allocated MiB", "allocated_bytes", 2**20, 1),
    ("peak MiB", "peak_bytes", 2**20, 1),
    ("prefill ms", "prefill_ms", 1, 1),
    ("error 1e-6", "output_error", 1e-6, 2),
)
_LEGEND = """Step: one token for each sequence. Reading: once what is kept, and a model's weights too. Kept:
by the cache; a layer: as much if all heads of a layer kept what the head that keeps most does. Peak: of the
GPU in a prefill. Error: against float64."""


def _table(records: list[dict]) -> str:
    rows = [("scope", "shape", "", "", *(title for title, *_ in _COLUMNS))]
    for one in records:
        shape = f"{one['batch']}x{one['length_tokens']}"
        values = [(one.get(name), unit, digits) for _, name, unit, digits in _COLUMNS]
        cells = ["" if value is None else f"{value / unit:.{digits}f}" for value, unit, digits in values]
        rows.append((one["scope"], shape, one["implementation"], one["method"], *cells))
    return "\n".join(aligned(rows, left=(0, 1, 2, 3)))


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
