"""The step at which a training run with ACP and its exact pair diverge, and whether pruning is the cause.

Six variants of one run train in lockstep: one exact, three with ACP, one exact repetition, and one exact
variant with one weight changed by one unit of bfloat16. All start from the same weights and read the same
batches, so they remain bitwise identical until the gradients of a step differ.
"""

import dataclasses
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn

from acp_repro.common.command import progress_bar
from acp_repro.model.capture import AttentionInputs, watch_attention
from acp_repro.pipeline.paper import with_columns
from acp_repro.pipeline.training.run_folder import compiles
from acp_repro.pipeline.training.task import Trained
from acp_repro.pipeline.training.trainer import (
    accumulate_gradients,
    compiled_blocks,
    eager,
    make_optimizer,
    set_learning_rate,
    update,
)

from ..task import FoXTask, perturb
from .pruned_mass import pruned_row_mass

TOLERANCES = (-10.0, -20.0, -40.0)
REPEAT, PERTURBED = "exact, a second time", "one weight moved by a unit of bfloat16"
MOST_STEPS = 1000
LOOK_EVERY = 100  # steps between measurements of the pruned mass


@dataclasses.dataclass
class Training:
    """One of the variants."""

    name: str
    log_pruning_tolerance: float | None
    model: nn.Module
    optimizer: torch.optim.AdamW
    loss: Tensor | None = None
    separated: bool = False

    def gradients(self) -> list[Tensor]:
        """The gradient of every weight, in the order and with the shapes of the model's parameters."""
        return [p.grad for p in self.model.parameters()]


@with_columns(
    "training",
    "training_log_pruning_tolerance",
    "step",
    "tokens",
    "loss_nats",
    "loss_difference_nats",
    "differing_gradients",
    "gradient_difference",
    "gradient_norm_difference",
    "most_different_gradient",
    "parameter_difference",
    "diverges_here",
    "pruned_ratio",
    "largest_pruned_mass",
)
def measure_first_divergence(trained: Trained) -> list[dict[str, Any]]:
    """One record for each step and variant; the first, exact variant is the reference and has no record.

    Loss, gradients (before clipping) and weights are compared at the same step, before the update.
    ``pruned_ratio`` and ``largest_pruned_mass`` are measured on all sequences of the step at which a variant
    diverges, and on one sequence every ``LOOK_EVERY`` steps; at other steps they are missing.
    """
    run, device = trained.run, trained.device
    task = FoXTask(run)
    trainings = [_start(task, device, "exact", None)]
    trainings += [_start(task, device, f"ACP, log epsilon {t:g}", t) for t in TOLERANCES]
    trainings += [_start(task, device, name, None) for name in (REPEAT, PERTURBED)]
    perturb(trainings[-1].model)
    blocks = [block for training in trainings for block in task.blocks(training.model)]
    names = [name for name, _ in trainings[0].model.named_parameters()]
    steps, rows = min(MOST_STEPS, task.steps), []
    with (
        # Otherwise Inductor chooses the tile of a reduction by timing, separately for each graph, and exact
        # and ACP may accumulate in different orders.
        inductor.patch(deterministic=True),
        compiled_blocks(blocks, compiles(run, device)),
        progress_bar(total=steps, desc=f"{run.name}: first_divergence", unit="step") as progress,
    ):
        for step in range(steps):
            indices = range(step * task.micro_batches, (step + 1) * task.micro_batches)
            batches = [[x.to(device) for x in task.batch(index)] for index in indices]
            rate = task.learning_rate(step)
            for training in trainings:
                set_learning_rate(training.optimizer, rate)
                training.optimizer.zero_grad(set_to_none=True)
                training.loss = accumulate_gradients(
                    training.model, task.loss, iter(batches), len(batches), dtype=run.training.dtype
                )
            for training in trainings[1:]:
                row = _compare(trainings[0], training, names)
                parts = not training.separated and bool(row["differing_gradients"])
                training.separated |= parts
                pruning = (
                    _measure_pruning(training, batches, parts, run.training.dtype)
                    if parts or not step % LOOK_EVERY
                    else {}
                )
                rows.append(
                    {
                        "training": training.name,
                        "training_log_pruning_tolerance": training.log_pruning_tolerance,
                        "step": step,
                        "tokens": (step + 1) * task.step_tokens,
                        **row,
                        "diverges_here": int(parts),
                        "pruned_ratio": pruning.get("pruned_ratio"),
                        "largest_pruned_mass": pruning.get("largest_pruned_mass"),
                    }
                )
            for training in trainings:
                update(training.model, training.optimizer, run.training.max_grad_norm)
            progress.set_postfix_str(
                f"separated: {sum(training.separated for training in trainings)} of {len(trainings) - 1}"
            )
            progress.update()
    return rows


def _start(task: FoXTask, device: torch.device, name: str, tolerance: float | None) -> Training:
    torch.manual_seed(task.run.seed)  # all variants and the run itself start from the same weights
    model = task.build().to(device)
    model.set_log_pruning_tolerance(tolerance)
    return Training(name, tolerance, model, make_optimizer(model, task.run.training, task.learning_rate(0)))


def _compare(exact: Training, training: Training, names: list[str]) -> dict[str, Any]:
    def norm(tensors: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(tensors)).norm()

    theirs, ours = exact.gradients(), training.gradients()
    apart = torch.stack([(a - b).abs().amax() for a, b in zip(theirs, ours, strict=True)])
    weights = zip(exact.model.parameters(), training.model.parameters(), strict=True)
    moved = torch.stack([(a.detach() - b.detach()).abs().amax() for a, b in weights]).amax()
    worst = int(apart.argmax())
    return {
        "loss_nats": training.loss.item(),
        "loss_difference_nats": (training.loss - exact.loss).item(),
        "differing_gradients": int((apart > 0).sum()),
        "gradient_difference": float(apart[worst]),
        "gradient_norm_difference": float(
            norm([a - b for a, b in zip(theirs, ours, strict=True)]) / norm(theirs)
        ),
        "most_different_gradient": names[worst] if apart[worst] > 0 else None,
        "parameter_difference": float(moved),
    }


def _measure_pruning(training: Training, batches: list, whole: bool, dtype: str) -> dict[str, float]:
    """The pruned ratio of the blocks and the largest pruned mass of a row, for a variant with ACP."""
    if training.log_pruning_tolerance is None:
        return {}
    ratios, masses = [], []

    def see(_layer: int, inputs: AttentionInputs) -> None:
        ratios.append(inputs.count().pruned_ratio.mean())
        masses.append(pruned_row_mass(inputs, *inputs.grid()).nan_to_num(0.0).amax())

    device = next(training.model.parameters()).device
    with eager(device, dtype), torch.no_grad(), watch_attention(training.model, see):
        for input_ids, _ in batches if whole else batches[:1]:
            for row in input_ids if whole else input_ids[:1]:
                training.model(row[None], return_hidden=True)
    return {
        "pruned_ratio": float(torch.stack(ratios).mean()),
        "largest_pruned_mass": float(torch.stack(masses).amax()),
    }
