"""The scripts in examples work as documented."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_custom_model_learns_with_pruning_enabled():
    own_model = load("own_model")
    torch.manual_seed(0)
    model = own_model.OwnModel()
    assert own_model.train(model, 100) < 0.6 * math.log(own_model.VOCABULARY)
    batch = own_model.make_batch(2, torch.Generator().manual_seed(1))
    outputs = []
    for tolerance in (None, -10.0, -0.1):
        for layer in model.attention:
            layer.log_pruning_tolerance = tolerance
        with torch.no_grad():
            outputs.append(model(batch))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-3, rtol=1e-3)
    assert not torch.equal(outputs[2], outputs[0])  # blocks were skipped
