"""Losses of a run: on held-out text, by position, at every training step, and of the same weights with and
without ACP."""

import copy
import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from acp_repro.common.files import read_json, read_json_lines
from acp_repro.model.loss import IGNORED_LABEL
from acp_repro.pipeline.paper import with_columns
from acp_repro.pipeline.training.trainer import autocast

from ..task import perturb
from ..trained import TrainedFoX, read_losses
from .needle import measure_needle

WINDOW_TOKENS = 101  # Section 4.2 and Figure 3
MOST_POSITIONS = 1024  # of a curve; a printed figure resolves no more
MOST_POINTS = 100  # of a log
DIFFERENCES = (  # columns of a comparison of the same weights with ACP and exact
    "test",
    "items",
    "differing_items",
    "largest_difference_nats",
    "mean_difference_nats",
    "differing_answers",
)


@with_columns("measured_tokens", "loss_nats")
def measure_loss(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record: the mean loss over all positions of the held-out text, in nats per token."""
    losses, tokens = trained.once(loss_by_position)
    return [{"measured_tokens": tokens, "loss_nats": float(losses.mean())}]


def loss_by_position(trained: TrainedFoX) -> tuple[Tensor, int]:
    """The loss (L,) in nats at every position, averaged over sequences (Figure 3; Appendix B), and the number
    of measured tokens. All context lengths of the suite read the same text, in whole pieces of the longest
    length."""
    # The longest context length, if the shorter ones divide it.
    unit = math.lcm(*(run.context_length for run in trained.suite.runs))
    batches = trained.heldout_batches(trained.measure_settings.loss_tokens, same_text_as=unit)
    total, sequences = torch.zeros(trained.run.context_length, dtype=torch.float64, device=trained.device), 0
    for loss, _ in read_losses(trained.model, batches, trained.settings, "loss"):
        total += loss.sum(0, dtype=torch.float64)
        sequences += len(loss)
    return (total / sequences).cpu(), sequences * len(total)


@with_columns("position", "window_tokens", "measured_tokens", "loss_nats")
def measure_loss_curve(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each position: the mean loss of the 101 positions centred there, if all are inside the
    context. At most 1024 positions are recorded: every s-th, with the smallest sufficient s."""
    losses, tokens = trained.once(loss_by_position)
    assert len(losses) >= WINDOW_TOKENS, f"the context is shorter than the window of {WINDOW_TOKENS} tokens"
    means = losses.unfold(0, WINDOW_TOKENS, 1).mean(-1, dtype=torch.float64)
    step = -(-len(means) // MOST_POSITIONS)
    return [
        {
            "position": position + WINDOW_TOKENS // 2,
            "window_tokens": WINDOW_TOKENS,
            "measured_tokens": tokens,
            "loss_nats": float(means[position]),
        }
        for position in range(0, len(means), step)
    ]


@with_columns(
    "step",
    "tokens",
    "layer",
    "pruned_ratio",
    "loss_nats",
    "averaged_steps",
    "training_device",
    "throughput_tokens_per_s",
)
def measure_training_log(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each layer and recorded step; for an exact run one record per step, without a layer.

    At most 100 steps are recorded: every s-th step with pruned ratios (of an exact run, every s-th step), and
    the last one. ``loss_nats`` is the mean over the steps since the previous record, and
    ``throughput_tokens_per_s`` their median.
    """
    run = trained.run
    lines = read_json_lines(run.folder / "metrics.jsonl")
    looks = [i for i, line in enumerate(lines) if run.log_pruning_tolerance is None or "pruned_ratio" in line]
    assert looks, "a log without pruned ratios"
    step = -(-len(looks) // MOST_POINTS)
    device = read_json(run.folder / "run.json")["device"]
    records, since = [], 0
    for index in looks[::-step][::-1]:  # includes the last one
        line, window = lines[index], lines[since : index + 1]
        since = index + 1
        shared = {
            "step": line["step"],
            "tokens": line["tokens"],
            "averaged_steps": len(window),
            "loss_nats": statistics.fmean(x["loss_nats"] for x in window),
            "training_device": device,
            "throughput_tokens_per_s": statistics.median(x["throughput_tokens_per_s"] for x in window),
        }
        records += [
            {**shared, "layer": None if ratio is None else layer, "pruned_ratio": ratio}
            for layer, ratio in enumerate(line.get("pruned_ratio", [None]))
        ]
    return records


@with_columns("step", "tokens", "loss_nats", "grad_norm")
def measure_step_losses(trained: TrainedFoX) -> list[dict[str, Any]]:
    """One record for each step: mean loss and gradient norm before clipping, at full precision."""
    return [
        {name: line[name] for name in ("step", "tokens", "loss_nats", "grad_norm")}
        for line in read_json_lines(trained.run.folder / "metrics.jsonl")
    ]


@with_columns(*DIFFERENCES)
def measure_same_weights(trained: TrainedFoX) -> list[dict[str, Any]]:
    """Differences ACP - exact: one record for the losses of all held-out tokens, and one for the prompts of
    the needle test. A third record shows the effect of chance: both models have ACP, and one weight of the
    second model is changed by one unit of bfloat16."""

    def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad(), autocast(trained.device, trained.run.training.dtype):
            return model.loss_per_token(*batch)[batch[1] != IGNORED_LABEL].cpu()

    moved, tests = copy.deepcopy(trained.model), {"loss": [], "loss, one weight moved": []}
    perturb(moved)
    for batch in trained.heldout_batches(trained.measure_settings.loss_tokens):
        acp, exact = (losses(trained.model, batch) for _ in trained.methods(both=True))
        for apart, other in zip(tests.values(), (exact, losses(moved, batch)), strict=True):
            apart.append(acp - other)
    rows = [summarize(test, torch.cat(apart)) for test, apart in tests.items()]
    prompts = measure_needle(trained, both=True)
    pairs = list(zip(prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :], strict=True))
    name = "answer_log_likelihood_nats"
    apart = torch.tensor([acp[name] - exact[name] for acp, exact in pairs])
    return [*rows, summarize("needle", apart, sum(acp["answer"] != exact["answer"] for acp, exact in pairs))]


def summarize(test: str, apart: Tensor, answers: int | None = None) -> dict[str, Any]:
    """The record of ``same_weights`` for the differences of all items."""
    return {
        "test": test,
        "items": len(apart),
        "differing_items": int((apart != 0).sum()),
        "largest_difference_nats": float(apart.abs().max()),
        "mean_difference_nats": float(apart.mean(dtype=torch.float64)),
        "differing_answers": answers,
    }
