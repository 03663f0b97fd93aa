"""For transformers' ``Trainer``: ``Trainer(model, ..., callbacks=[RetentionCallback()])``."""

from __future__ import annotations

from transformers import TrainerCallback


class RetentionCallback(TrainerCallback):
    """Tells the gates the training step, and does the ascent on lambda after each optimiser step.

    Logs ``retention_multiplier`` and ``retention_violation`` of each gate.
    """

    def __init__(self):
        self._violation: list[float] = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        _retention(model).step = state.global_step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self._violation = _retention(model).ascend().tolist()

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        if logs is not None and self._violation:
            ours = {
                "retention_multiplier": _retention(model).multiplier.tolist(),
                "retention_violation": self._violation,
            }
            logs |= ours
            state.log_history[-1] |= ours  # a copy that was made before


def _retention(model):
    """The ``retention`` of the model, or of the model inside a wrapper."""
    return getattr(model, "module", model).retention
