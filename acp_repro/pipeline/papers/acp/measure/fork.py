"""When do a training with ACP and its exact pair separate, and does pruning separate them?

Four trainings of one run go side by side, step by step: one exact, two with ACP, and one exact with one
weight changed by one unit of bfloat16. All start from the same weights and read the same batches. So they are
one training until a step's gradients differ in a bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from acp_repro.pipeline.paper import Quantity

from .pruned_mass import pruned_row_mass

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from acp_repro.model.capture import AttentionInputs
    from acp_repro.pipeline.training.task import Trained

    from ..task import FoXTask

TOLERANCES = (-10.0, -40.0)
MOST_STEPS = 1000
LOOK_EVERY = 100  # steps between measurements of the pruned mass


@dataclasses.dataclass
class Way:
    """One of the trainings."""

    name: str
    log_pruning_tolerance: float | None
    model: nn.Module
    optimizer: torch.optim.AdamW
    loss: Tensor | None = None
    parted: bool = False

    def gradients(self) -> list[Tensor]:
        """The gradient of every weight, in the order and the shapes of the model's parameters."""
        return [p.grad for p in self.model.parameters()]


def measure(trained: Trained) -> list[dict[str, Any]]:
    """One record a step and training, except the first training, which is exact.

    The trainings are of the run in all but their tolerance: its seed, batches, schedule and compiled blocks.
    Columns compare with the exact training at the same step, before the weights change: the mean loss, the
    gradients (before clipping) and the weights.

    ``largest_pruned_mass`` is the largest attention weight that a row loses to pruning (``pruned_mass``). It
    is taken on all sequences of the step that separates the trainings, and on one sequence every
    ``LOOK_EVERY`` steps. At other steps it is missing, and so is ``pruned_ratio``.
    """
    from tqdm import tqdm

    from acp_repro.pipeline.training.optimizer import set_learning_rate
    from acp_repro.pipeline.training.run_folder import compiles
    from acp_repro.pipeline.training.step import accumulate_gradients, compiled_blocks, update

    from ..task import FoXTask, nudge

    run, device = trained.run, trained.device
    task = FoXTask(run)
    ways = [_start(task, device, "exact", None)]
    ways += [_start(task, device, f"ACP, log epsilon {t:g}", t) for t in TOLERANCES]
    ways.append(_start(task, device, "one weight moved by a unit of bfloat16", None))
    nudge(ways[-1].model)
    blocks = [block for way in ways for block in task.blocks(way.model)]
    names = [name for name, _ in ways[0].model.named_parameters()]
    steps, rows = min(MOST_STEPS, task.steps), []
    with (
        _no_autotuning(),
        compiled_blocks(blocks, compiles(run, device)),
        tqdm(total=steps, desc=f"{run.name}: fork", unit="step") as progress,
    ):
        for step in range(steps):
            indices = range(step * task.micro_batches, (step + 1) * task.micro_batches)
            batches = [[x.to(device) for x in task.batch(index)] for index in indices]
            rate = task.learning_rate(step)
            for way in ways:
                set_learning_rate(way.optimizer, rate)
                way.optimizer.zero_grad(set_to_none=True)
                way.loss = accumulate_gradients(
                    way.model, task.loss, iter(batches), len(batches), dtype=run.training.dtype
                )
            for way in ways[1:]:
                row = _compare(ways[0], way, names)
                parts = not way.parted and bool(row["differing_gradients"])
                way.parted |= parts
                looked = (
                    _look(way, batches, parts, run.training.dtype) if parts or not step % LOOK_EVERY else {}
                )
                rows.append(
                    {
                        "training": way.name,
                        "training_log_pruning_tolerance": way.log_pruning_tolerance,
                        "step": step,
                        "tokens": (step + 1) * task.step_tokens,
                        **row,
                        "parts_here": int(parts),
                        "pruned_ratio": looked.get("pruned_ratio"),
                        "largest_pruned_mass": looked.get("largest_pruned_mass"),
                    }
                )
            for way in ways:
                update(way.model, way.optimizer, run.training.max_grad_norm)
            progress.set_postfix_str(f"parted: {sum(way.parted for way in ways)} of {len(ways) - 1}")
            progress.update()
    return rows


def _no_autotuning() -> contextlib.AbstractContextManager:
    """Turns off Inductor's choice of a reduction's tile by timing, which it makes for each graph separately.

    With it, exact and ACP may sum in two orders. They once separated at the first step, on a GPU that did
    other work too; this is the likely reason.
    """
    from torch._inductor import config

    return config.patch(deterministic=True)


def _start(task: FoXTask, device: torch.device, name: str, tolerance: float | None) -> Way:
    import torch

    from acp_repro.pipeline.training.optimizer import make_optimizer

    torch.manual_seed(task.run.seed)  # the same weights for all, and for the run itself
    model = task.build().to(device)
    model.set_log_pruning_tolerance(tolerance)
    return Way(name, tolerance, model, make_optimizer(model, task.run.training, task.learning_rate(0)))


def _compare(exact: Way, way: Way, names: list[str]) -> dict[str, Any]:
    import torch

    def norm(tensors: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(tensors)).norm()

    theirs, ours = exact.gradients(), way.gradients()
    apart = torch.stack([(a - b).abs().amax() for a, b in zip(theirs, ours, strict=True)])
    weights = zip(exact.model.parameters(), way.model.parameters(), strict=True)
    moved = torch.stack([(a.detach() - b.detach()).abs().amax() for a, b in weights]).amax()
    worst = int(apart.argmax())
    return {
        "loss_nats": way.loss.item(),
        "loss_difference_nats": (way.loss - exact.loss).item(),
        "differing_gradients": int((apart > 0).sum()),
        "gradient_difference": float(apart[worst]),
        "gradient_norm_difference": float(
            norm([a - b for a, b in zip(theirs, ours, strict=True)]) / norm(theirs)
        ),
        "most_different_gradient": names[worst] if apart[worst] > 0 else None,
        "weight_difference": float(moved),
    }


def _look(way: Way, batches: list, whole: bool, dtype: str) -> dict[str, float]:
    """The pruned share of the blocks, and the largest pruned mass of a row, for a training with ACP."""
    import torch

    from acp_repro.model.capture import watch_attention
    from acp_repro.pipeline.training.step import eager

    if way.log_pruning_tolerance is None:
        return {}
    ratios, masses = [], []

    def see(_layer: int, inputs: AttentionInputs) -> None:
        ratios.append(inputs.count().pruned_ratio.mean())
        masses.append(pruned_row_mass(inputs, *inputs.grid()).nan_to_num(0.0).amax())

    device = next(way.model.parameters()).device
    with eager(device, dtype), torch.no_grad(), watch_attention(way.model, see):
        for input_ids, _ in batches if whole else batches[:1]:
            for row in input_ids if whole else input_ids[:1]:
                way.model(row[None], return_hidden=True)
    return {
        "pruned_ratio": float(torch.stack(ratios).mean()),
        "largest_pruned_mass": float(torch.stack(masses).amax()),
    }


QUANTITY = Quantity(
    "fork",
    "training training_log_pruning_tolerance step tokens loss_nats loss_difference_nats "
    "differing_gradients gradient_difference gradient_norm_difference most_different_gradient "
    "weight_difference parts_here pruned_ratio largest_pruned_mass",
    measure,
    lambda suite: sorted(suite.runs, key=lambda run: run.log_pruning_tolerance is not None)[:1],
    untrained=lambda run: True,
    large=True,
    optional=True,
)
