"""Adapters, hooks and offloaded weights work on any submodule, because every path calls modules."""

import copy

import pytest
import torch
from model_helpers import SMALL, relative_error
from torch import nn

from acp_repro.model import FoXCache


class Adapter(nn.Module):
    """A low-rank adapter of a projection that exposes the projection's weight, as in PEFT."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, False), nn.Linear(2, base.out_features, False)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

    def merged(self) -> nn.Linear:
        merged = copy.deepcopy(self.base)
        merged.weight.data += self.up.weight.data @ self.down.weight.data
        return merged


def replace(model, old, new):
    """Replaces each module of type ``old`` in ``model`` by the result of ``new``."""
    for parent in [m for m in model.modules() if not isinstance(m, old)]:
        for name, child in list(parent.named_children()):
            if isinstance(child, old):
                setattr(parent, name, new(child))
    return model


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_on_every_projection_run_and_learn(small_model, small_ids, compiled):
    adapted = replace(small_model, nn.Linear, Adapter)
    merged = replace(copy.deepcopy(adapted), Adapter, Adapter.merged)
    torch.compiler.reset()
    call = torch.compile(adapted, backend="eager") if compiled else adapted
    if not compiled:
        assert relative_error(adapted(small_ids), merged(small_ids)) < 1e-5
    loss = call(small_ids, labels=small_ids)
    assert relative_error(loss, merged(small_ids, labels=small_ids)) < 1e-5
    loss.mean().backward()
    dead = [name for name, p in adapted.named_parameters() if p.requires_grad and not (p.grad != 0).any()]
    assert not dead


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hooks_of_every_module_are_called(small_model, small_ids, compiled):
    called, names = set(), dict(small_model.named_modules())
    names = {name for name, module in names.items() if not isinstance(module, nn.ModuleList)}
    for name in names:
        small_model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    torch.compiler.reset()
    call = torch.compile(small_model, backend="eager") if compiled else small_model
    call(small_ids, labels=small_ids)
    assert called == names
    cache = FoXCache(SMALL["num_hidden_layers"])
    with torch.no_grad():
        small_model(small_ids[:, :9], cache=cache)
        called.clear()
        small_model(small_ids[:, 9:10], cache=cache)
    assert called == {name for name in names if not name.endswith("core")}  # the cache computes attention


def offload(module: nn.Module) -> None:
    """Weights exist only during calls, as with ``accelerate.cpu_offload``."""
    held, forward = dict(module.named_parameters(recurse=False)), module.forward
    away = {name: nn.Parameter(p.to("meta")) for name, p in held.items()}

    def there(*given, **named):
        module._parameters.update(held)
        try:
            return forward(*given, **named)
        finally:
            module._parameters.update(away)

    module._parameters.update(away)
    module.forward = there


@torch.no_grad()
def test_offloaded_weights(small_model, small_ids):
    logits, loss = small_model(small_ids), small_model(small_ids, labels=small_ids)
    for module in small_model.modules():
        offload(module)
    # Without QK-norm weights, delta follows from norms, and other weights below epsilon are pruned.
    assert relative_error(small_model(small_ids), logits) < 1e-4
    assert relative_error(small_model(small_ids, labels=small_ids), loss) < 1e-4
    cache = FoXCache(SMALL["num_hidden_layers"])
    parts = [small_model(part, cache=cache) for part in (small_ids[:, :140], small_ids[:, 140:])]
    assert relative_error(torch.cat(parts, 1), logits) < 1e-4
