"""A first suite for a user's own text, sized for the present machine, with a comment for each choice."""

import json
from pathlib import Path

import numpy as np

from acp_repro.common.command import choose_device
from acp_repro.common.files import write_text
from acp_repro.pipeline.data.config import DataConfig
from acp_repro.pipeline.data.corpus import SPLITS, Reader
from acp_repro.pipeline.data.files import DataError

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
SCALES = {
    "cpu": dict(
        takes="a few minutes on two cores",
        longest=1024,
        size="0.2M: {num_hidden_layers: 2, hidden_size: 64, head_dim: 16, tokens: 614_400, "
        "learning_rate: 3e-2}",
        training="batch_tokens: 2048, micro_batch_tokens: 2048, warmup_tokens: 40_960, dtype: float32",
        measured="pruned_ratio_tokens: 16_384, sweep_tokens: 16_384, loss_tokens: 65_536, "
        "timing_tokens: 2048",
    ),
    "cuda": dict(
        takes="a few minutes on a GPU",
        longest=4096,
        size="12M: {num_hidden_layers: 6, hidden_size: 384, tokens: 50_000_000, learning_rate: 2e-3}",
        training="batch_tokens: 65_536, micro_batch_tokens: 32_768, warmup_tokens: 5_000_000, "
        "dtype: bfloat16",
        measured="pruned_ratio_tokens: 524_288, sweep_tokens: 524_288, loss_tokens: 4_194_304, "
        "timing_tokens: 65_536",
    ),
}
TEMPLATE = """\
# Written by `python -m acp_repro.suite --new`, for {takes}. docs/suite-keys.md lists every
# key with its default. The defaults are the paper's, for many GPUs; this file replaces those that decide how
# long training and measuring take.
description: {description}
data:
  corpus: text
  path: {path}  # a file or folder
  heldout: {heldout}  # share of the documents that training never reads; the measures read these only
  tokenizer: bytes  # for some megabytes of text, {{bpe: 4096}} trains a byte-pair encoding of 4096 ids
sizes:
  # The name of the size is part of each run's name. A run reads `tokens` tokens: a short text several times.
  {size}
grid:
  # The product of the lists makes the runs. -10 is ACP with epsilon = e^-10; null is full attention, the
  # baseline. A document with fewer tokens than the context length is not read.
  - {{size: [{name}], context_length: {lengths}, log_pruning_tolerance: [-10, null]}}
# batch_tokens is a multiple of micro_batch_tokens, and that of each context length. Reduce micro_batch_tokens
# if the memory is not enough.
training: {{{training}}}
# How many tokens of held-out text each measure reads at most; one sequence at least.
measure:
  {{{measured}, timing_repeats: 3,
   needle_lengths: 4, needle_depths: [0, 0.5, 1], needle_samples: 2,
   # The paper's tasks need the Hub, or files in lm_eval_data.
   lm_eval_tasks: [book_perplexity], lm_eval_items: 60}}
"""


def write_suite(path: Path, text: str) -> str:
    """Writes a suite of ACP for a file or folder of text to ``path``; returns the estimated time of its
    Figure 2 in words."""
    source, scale = str(Path(text).resolve()), SCALES[choose_device(None).type]
    shares = ((share, _half_in_longer(source, share)) for share in (0.05, 0.2, 0.4))
    heldout, half = next((one for one in shares if one[1] >= LENGTHS[0]), (0, 0))
    if not heldout:
        raise DataError(
            f"--text {text}: most of the text is in documents that are too short; join them into files of at "
            f"least {LENGTHS[0]} bytes"
        )
    lengths = [length for length in LENGTHS if length <= min(half, scale["longest"])][-2:]
    names = {"description": json.dumps(f"small models on {Path(source).name}"), "path": json.dumps(source)}
    facts = {"heldout": heldout, "name": scale["size"].partition(":")[0], "lengths": lengths}
    write_text(path, TEMPLATE.format(**scale, **names, **facts))
    return scale["takes"]


def _half_in_longer(source: str, heldout: float) -> int:
    """The largest number of bytes such that at least half of the text of each split is in documents of this
    length or longer."""
    sizes = {split: [0] for split in SPLITS}
    for split, document in Reader(DataConfig("text", source, heldout=heldout)).documents("reading"):
        sizes[split].append(len(document.data))
    ordered = map(np.sort, sizes.values())
    return min(int(one[np.searchsorted(np.cumsum(one), one.sum() / 2)]) for one in ordered)
