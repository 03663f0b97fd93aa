"""A step through a CUDA graph gives the numbers of the step itself."""

import pytest
import torch
from torch import nn

from acp_repro.training.graphs import GraphedLoss, without_graphs

pytestmark = pytest.mark.gpu


def test_losses_and_gradients_are_those_of_the_function():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)).cuda()
    model.unused = nn.Parameter(torch.ones(3, device="cuda"))

    def losses(x, price):
        out = model(x)
        return out.square().mean() * price, out.detach().abs().mean()

    graphed = GraphedLoss(losses, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (8, 5, 8, 5, 8):  # each shape has its graph, and weights change in between
        x, price = torch.randn(rows, 16, device="cuda"), torch.rand((), device="cuda")
        found = []
        for function in (losses, graphed):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss, other = function(x, price)
            (loss / 2).backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found.append((loss.item(), other.item(), gradients))
        assert model.unused.grad is None
        torch.testing.assert_close(found[0], found[1])
        optimizer.step()


def test_without_graphs_hooks_see_what_goes_on():
    model, seen = nn.Linear(4, 1).cuda(), []
    graphed = GraphedLoss(lambda x: (model(x).sum(),), model)
    x = torch.randn(2, 4, device="cuda")
    graphed(x)
    model.register_forward_hook(lambda *_: seen.append(1))
    graphed(x)
    assert not seen
    with without_graphs():
        graphed(x)
    assert seen
