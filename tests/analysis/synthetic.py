"""Synthetic results for the suite of ``tests.suites``, which require no trained model."""

from pathlib import Path

from acp_repro.pipeline.records import write_records
from acp_repro.pipeline.suite_file import load_suite
from analysis import drawing
from tests.suites import YAML, write_suite

FACTS = {"device": "a processor", "dtype": "float32", "trained_tokens": 1536}


def draw(item: str, suite: str = "mini") -> str:
    """Runs ``make ITEM SUITE=SUITE`` in this process on existing results; returns the caption as one line."""
    path = drawing.draw(suite, item)
    return " ".join(path.with_suffix(".md").read_text().split())


def two_lengths(folder, architectures: str = "pro") -> None:
    """A suite ``mini`` with ACP and exact runs at 256 and 512 tokens, in ``folder``."""
    text = YAML.replace("[128]", "[256, 512]").replace("{size:", f"{{architecture: [{architectures}], size:")
    write_suite(
        folder,
        text.replace("batch_tokens: 256", "batch_tokens: 512").replace(
            "micro_batch_tokens: 128", "micro_batch_tokens: 512"
        ),
    )


def published_savings(folder) -> Path:
    """Publishes suite ``mini`` with its runs' savings in working folder ``folder``; returns its file."""
    two_lengths(folder)
    path = folder / "experiments" / "mini.yaml"
    path.write_text(f"{path.read_text()}\npublished: true\n")
    write_savings()
    return path


def write(run_name: str, metric: str, *rows: dict, suite: str = "mini") -> None:
    """Writes results of one run of a suite; missing columns default to 1."""
    suite = load_suite(suite)
    kind = suite.paper.metric(metric)
    rows = [dict.fromkeys(kind.columns, 1) | row for row in rows]
    write_records(suite, suite.run(run_name), kind, rows, **FACTS)


def write_savings(architecture: str = "pro", suite: str = "mini") -> None:
    """Writes savings: half the blocks and time and twice the throughput at 256 tokens, more at 512."""
    for length, pruned, fast in ((256, 5, 1.0), (512, 7, 0.8)):
        run = f"{architecture}-tiny-{length}-acp"
        write(
            run,
            "pruned_ratio",
            *(
                {
                    "layer": layer,
                    "head": 0,
                    "block_q_tokens": 16,
                    "block_k_tokens": 16,
                    "pruned_blocks": pruned,
                    "causal_blocks": 10,
                    "pruned_ratio": pruned / 10,
                }
                for layer in (0, 1)
            ),
            suite=suite,
        )
        write(
            run,
            "attention_time",
            {"method": "acp", "forward_ms": fast, "backward_ms": fast, "boundary_search_ms": fast / 10},
            {"method": "exact", "forward_ms": 2, "backward_ms": 2, "boundary_search_ms": None},
            suite=suite,
        )
        write(
            run,
            "throughput",
            {"method": "acp", "throughput_tokens_per_s": 200 / fast},
            {"method": "exact", "throughput_tokens_per_s": 100},
            suite=suite,
        )
