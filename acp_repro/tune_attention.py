"""Finds the fastest tiles of the kernels on this GPU: ``python -m acp_repro.tune_attention``.

Every candidate is checked against the present tiles before it is timed. The last lines printed are the table
for ``acp_repro/attention/triton/tiles.py`` on this GPU. A difference of a few percent is noise.
"""

from __future__ import annotations

from .common import files
from .common.command import command, described_parser, output_file, positive, run_command
from .common.errors import UsageError


@command()
def main(arguments: list[str] | None = None) -> int:
    parser = described_parser("tune_attention", __doc__, as_written=True)
    add = parser.add_argument
    add("--head-dims", type=positive, nargs="+", default=[64, 128], metavar="N", help="default: 64 128")
    add("--length", type=positive, default=16384, metavar="N", help="tokens a sequence (default: 16384)")
    add("--repeats", type=positive, default=10, metavar="N", help="default: %(default)s")
    add("--jobs", type=positive, metavar="N", help="processes that compile (default: one a core, at most 16)")
    add("--csv", type=output_file, metavar="FILE", help="write every timing there")
    options = parser.parse_args(arguments)

    import torch

    if not torch.cuda.is_available():
        raise UsageError("tiles can be tuned only on a GPU, and PyTorch finds none")

    from tqdm import tqdm

    from .benchmark.tiles import KERNELS, tune

    rows, best = [], {}
    for head_dim in options.head_dims:
        work = tune(head_dim, options.length, options.repeats, options.jobs)
        for kernel, timings in tqdm(work, desc=f"head_dim {head_dim}", unit="kernel", total=len(KERNELS)):
            rows += [[head_dim, kernel, *t.tile, t.milliseconds, t.why_not] for t in timings]
            print(f"\nhead_dim {head_dim}, {kernel}: {timings[0].milliseconds:.3f} ms now")
            good = sorted((t for t in timings if t.milliseconds), key=lambda t: t.milliseconds)
            for t in good[:5]:
                print(f"  {t.milliseconds:.3f} ms  {t.tile}")
            best[head_dim, kernel] = good[0].tile
    print()
    for head_dim in options.head_dims:
        tiles = ", ".join(f"Tile{tuple(best[head_dim, kernel])}" for kernel in KERNELS)
        print(f"    {head_dim}: Tiles({tiles}),")
    if options.csv:
        names = "head_dim kernel rows columns warps stages registers milliseconds why_not"
        files.write_csv(options.csv, names.split(), rows)
        print(f"timings: {options.csv}")
    return 0


if __name__ == "__main__":
    run_command(main)
