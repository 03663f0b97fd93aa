"""What removal of tokens costs and saves in fresh encoders of DistilBERT's shape; no training, no data.

    python scripts/retention_speed.py --lengths 512 4096 --batch 64

Prints a line a method, place of the gate, budget and length: what the measure `speed` of a suite records, as
ratios against the same encoder without gates. --profile adds where the time of inference goes.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import torch
import transformers

from acp_repro.chain.command import choose_device, command, positive, run_command
from acp_repro.papers.retention.measure import speed
from acp_repro.papers.retention.settings import METHODS, MeasureConfig
from acp_repro.retention import RetentionConfig, retain

SHAPES = {"distilbert": (6, 768, 12, 3072), "tiny": (2, 64, 4, 128)}
VOCABULARY = 16_384


@command()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--lengths", type=positive, nargs="+", default=[512], help="tokens of an example (default: 512)")
    add("--batch", type=positive, default=64, help="examples (default: 64)")
    add("--training-batch", type=positive, default=32, help="examples of a training pass (default: 32)")
    add("--shape", choices=SHAPES, default="distilbert")
    add("--methods", choices=METHODS, nargs="+", default=["ar"])
    add("--gates", nargs="+", default=["input", "after_blocks"])
    add("--budgets", type=float, nargs="+", default=[0.5, 0.3])
    add("--gate-keys", action="store_true", help="train with log z on the keys")
    add("--repeats", type=positive, default=20)
    add("--device")
    add("--profile", action="store_true", help="also the operators that take longest, of each line")
    options = parser.parse_args(arguments)
    device = choose_device(options.device)
    for length in options.lengths:
        for method in options.methods:
            for gates in options.gates:
                for budget in options.budgets:
                    _line(options, device, length, method, gates, budget)
    return 0


def _line(options, device: torch.device, length: int, method: str, gates: str, budget: float) -> None:
    changes = {**METHODS[method], "gates": gates, "gate_keys": options.gate_keys}
    trained = _fresh(options, device, length, RetentionConfig(budget, **changes))
    (row,) = speed.measure(trained)

    def ratio(name: str) -> str:
        ours, dense = row[name], row[f"dense_{name}"]
        return "-" if not ours or not dense else f"{ours / dense:.2f}"

    kept_ms = row["dense_batch_ms"] * row["example_flop"] / row["dense_example_flop"]
    print(
        f"{method} {gates} {100 * budget:g} % {length} tokens: {row['batch_ms']:.2f} ms of "
        f"{row['dense_batch_ms']:.2f}, {row['dense_batch_ms'] / row['batch_ms']:.2f}x, "
        f"{row['batch_ms'] / kept_ms:.2f} of the kept FLOPs' time, scorer "
        f"{100 * row['scorer_ms'] / row['batch_ms']:.1f} %, memory {ratio('peak_memory_bytes')}; "
        f"training: time {ratio('training_batch_ms')}, memory {ratio('training_peak_memory_bytes')}",
        flush=True,
    )
    if options.profile:
        _profile(trained.model.eval().to(_dtype(device)), length, options.batch, device)


def _fresh(options, device: torch.device, length: int, config: RetentionConfig) -> SimpleNamespace:
    """What the measure asks of a trained run, with weights at random."""
    layers, width, heads, inner = SHAPES[options.shape]
    torch.manual_seed(0)
    model = transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=length,
            n_layers=layers,
            dim=width,
            n_heads=heads,
            hidden_dim=inner,
        )
    )

    class Tokens:
        all_special_ids = (0, 1, 2, 3, 4)

        def __len__(self) -> int:
            return VOCABULARY

    dtype = str(_dtype(device)).removeprefix("torch.")
    return SimpleNamespace(
        model=retain(model, config).to(device),
        device=device,
        measure=MeasureConfig(
            speed_lengths_tokens=[length], speed_batch_examples=options.batch, timing_repeats=options.repeats
        ),
        run=SimpleNamespace(
            training=SimpleNamespace(dtype=dtype),
            dataset=SimpleNamespace(
                max_tokens=length, micro_batch_examples=None, batch_examples=options.training_batch
            ),
        ),
        texts=SimpleNamespace(tokenizer=Tokens(), labelled=SimpleNamespace(is_extractive=False)),
    )


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _profile(model, length: int, batch: int, device: torch.device) -> None:
    from torch.profiler import profile

    ids = torch.randint(5, VOCABULARY, (batch, length), device=device)
    with torch.no_grad():
        model(input_ids=ids)
        with profile() as profiled:
            model(input_ids=ids)
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(profiled.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    run_command(main)
