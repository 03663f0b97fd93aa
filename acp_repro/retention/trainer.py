"""A callback for transformers' ``Trainer``: ``Trainer(model, ..., callbacks=[RetentionCallback()])``."""

from typing import Any

from transformers import TrainerCallback


class RetentionCallback(TrainerCallback):
    """Sets the training step of the gates, and performs the ascent on lambda after each optimiser step.

    The callback logs ``retention_multiplier`` and ``retention_violation`` of each gate.
    """

    def __init__(self):
        self._violation: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        _retention(model).step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._violation = _retention(model).ascend().tolist()

    def on_log(
        self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any
    ) -> None:
        if logs is not None and self._violation:
            ours = {
                "retention_multiplier": _retention(model).multiplier.tolist(),
                "retention_violation": self._violation,
            }
            logs |= ours
            state.log_history[-1] |= ours  # Trainer copied ``logs`` before this call


def _retention(model: Any) -> Any:
    """The ``retention`` of a model, unwrapped if necessary."""
    return getattr(model, "module", model).retention
