"""The scripts in examples work as documented."""

import importlib.util
import math
from pathlib import Path

import torch

from acp_repro.attention import forgetting_attention
from acp_repro.model.capture import AttentionInputs

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

    inputs = []
    core = model.attention[1].core
    core.register_forward_hook(lambda module, given, out: inputs.append(AttentionInputs(*given)))
    batch = own_model.make_batch(2, torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(batch)
    q, k, v, log_fgate = (getattr(inputs[0], name) for name in ("q", "k", "v", "log_fgate"))
    _, start = forgetting_attention(
        q, k, v, log_fgate, head_first=True, adaptive_threshold=inputs[0].threshold, return_start_index=True
    )
    assert start.max() > 0  # blocks were skipped
    for layer in model.attention:
        layer.log_pruning_tolerance = None
    with torch.no_grad():
        torch.testing.assert_close(model(batch), logits, atol=1e-3, rtol=1e-3)
