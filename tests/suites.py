"""A suite so small that a run takes a second, for the tests of the chain."""

from pathlib import Path

YAML = """
description: a test
data: {corpus: text, path: text.txt, heldout: [heldout.txt]}
sizes:
  tiny: {num_hidden_layers: 2, hidden_size: 32, head_dim: 16, tokens: 1536, learning_rate: 1e-2}
grid:
  - {size: [tiny], context_length: [128], log_pruning_tolerance: [-10, null]}
training:
  {batch_tokens: 256, micro_batch_tokens: 128, warmup_tokens: 512, dtype: float32,
   checkpoint_every_seconds: 0}
measure: {pruned_ratio_tokens: 256, timing_tokens: 128, timing_repeats: 1, loss_tokens: 256}
"""


def write_suite(folder: Path, text: str = YAML, name: str = "mini") -> None:
    """``experiments/NAME.yaml`` and its corpus under ``folder``, which is to be the working folder."""
    (folder / "experiments").mkdir(exist_ok=True)
    (folder / "experiments" / f"{name}.yaml").write_text(text)
    words = "the quick brown fox jumps over the lazy dog while it forgets what it saw before "
    (folder / "text.txt").write_text(words * 60)
    (folder / "heldout.txt").write_text("a dog that forgets is a fox that remembers " * 20)
