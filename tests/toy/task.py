"""How one run is trained and measured."""

import torch
from torch import nn

from acp_repro.pipeline.training.task import Task


class ToyTask(Task):
    steps, step_tokens = 60, 8

    def build(self):
        return nn.Sequential(nn.Linear(5, self.run.width), nn.Linear(self.run.width, 1))

    def batch(self, index):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(index))
        return x, x.sum(1, keepdim=True)

    def loss(self, model, x, y):
        return (model(x) - y).square().mean()

    def learning_rate(self, step):
        return 0.05


def measure_error(trained):
    batches = [trained.task.batch(1000 + i) for i in range(trained.measure_settings.batches)]
    return [{"squared_error": trained.task.loss(trained.model, *batch).item()} for batch in batches]
