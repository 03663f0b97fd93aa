"""A first suite for a user's own text: sized for the machine at hand, with a comment for each choice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from acp_repro.common.command import choose_device
from acp_repro.common.files import write_text
from acp_repro.pipeline.data.config import DataConfig
from acp_repro.pipeline.data.corpus import SPLITS, Reader
from acp_repro.pipeline.data.files import DataError

# A token of a byte-pair encoding has at most about this many bytes.
BYTES_PER_TOKEN = 6
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
# Shorter texts than this many bytes are read as bytes: they have too few pairs to merge.
BPE_FROM = 300_000

CPU = SimpleNamespace(
    takes="a few minutes on two cores",
    longest=1024,
    vocabulary=1024,
    size="0.2M: {num_hidden_layers: 2, hidden_size: 64, head_dim: 16, tokens: 614_400, learning_rate: 3e-2}",
    batch=2048,
    micro_batch=2048,
    warmup=40_960,
    dtype="float32",
    measured=16_384,
    loss=65_536,
    timing=2048,
)
GPU = SimpleNamespace(
    takes="a few minutes on a GPU",
    longest=4096,
    vocabulary=4096,
    size="12M: {num_hidden_layers: 6, hidden_size: 384, tokens: 50_000_000, learning_rate: 2e-3}",
    batch=65_536,
    micro_batch=32_768,
    warmup=5_000_000,
    dtype="bfloat16",
    measured=524_288,
    loss=4_194_304,
    timing=65_536,
)

TEMPLATE = """\
# Written by `python -m acp_repro.suite --new`, for {scale.takes}. docs/suite-keys.md lists
# every key with its default. The defaults are the paper's, for many GPUs; this file replaces those that
# decide how long training and measuring take.
description: {description}
data:
  corpus: text
  path: {path}  # a file or folder
  heldout: {heldout}  # share of the documents that training never reads; the measures read these only
  tokenizer: {tokenizer}  # bytes, or a byte-pair encoding of that many ids, trained on this text
sizes:
  # The name of the size is part of each run's name. A run reads `tokens` tokens: a short text several times.
  {scale.size}
grid:
  # The product of the lists makes the runs. -10 is ACP with epsilon = e^-10; null is full attention, the
  # baseline. A document with fewer tokens than the context length is not read.
  - {{size: [{size}], context_length: {lengths}, log_pruning_tolerance: [-10, null]}}
training:
  batch_tokens: {scale.batch}  # a multiple of micro_batch_tokens, and that of every context length
  micro_batch_tokens: {scale.micro_batch}  # reduce this value if the GPU's memory is not enough
  warmup_tokens: {scale.warmup}
  dtype: {scale.dtype}
measure:  # tokens of held-out text: at most so many, and at least one sequence
  pruned_ratio_tokens: {scale.measured}
  timing_tokens: {scale.timing}
  timing_repeats: 3
  loss_tokens: {scale.loss}
  sweep_tokens: {scale.measured}
  needle_lengths: 4
  needle_depths: [0, 0.5, 1]
  needle_samples: 2
  lm_eval_tasks: [book_perplexity]  # the paper's tasks need the Hub, or files in lm_eval_data
  lm_eval_items: 60
"""


def write_suite(path: Path, text: str) -> str:
    """Writes a suite of ACP for a file or folder of text to ``path``; returns how long its Figure 2 takes."""
    scale = CPU if choose_device(None).type == "cpu" else GPU
    source = str(Path(text).resolve())
    shares = ((share, *_half_and_all(source, share)) for share in (0.05, 0.2, 0.4))
    heldout, half, total = next((one for one in shares if one[1] >= LENGTHS[0] * BYTES_PER_TOKEN), (0, 0, 0))
    if not heldout:
        raise DataError(
            f"--text {text}: most of its documents are too short to train on; join them into files of at "
            f"least {LENGTHS[0] * BYTES_PER_TOKEN:,} bytes"
        )
    size, tokenizer = BYTES_PER_TOKEN, f"{{bpe: {scale.vocabulary}}}"
    if total < BPE_FROM:
        size, tokenizer = 1, "bytes"
    lengths = [length for length in LENGTHS if length * size <= half and length <= scale.longest][-2:]
    names = {"size": scale.size.partition(":")[0], "lengths": lengths}
    facts = {"path": json.dumps(source), "heldout": heldout, "tokenizer": tokenizer}
    facts["description"] = json.dumps(f"small models on {Path(source).name}")
    write_text(path, TEMPLATE.format(scale=scale, **names, **facts))
    return scale.takes


def _half_and_all(source: str, heldout: float) -> tuple[int, int]:
    """Bytes: half of each split's text is in documents of at least so many; and all of the text."""
    sizes = {split: [0] for split in SPLITS}
    for split, document in Reader(DataConfig("text", source, heldout=heldout)).documents("reading"):
        sizes[split].append(len(document.data))
    ordered = [np.sort(of_split) for of_split in sizes.values()]
    sums = [np.cumsum(one) for one in ordered]
    half = min(int(one[np.searchsorted(s, s[-1] / 2)]) for one, s in zip(ordered, sums, strict=True))
    return half, int(sum(s[-1] for s in sums))
