"""On a GPU: a training step against the CPU, and gradients under checkpointing."""

import pytest
import torch

from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.pipeline.run import TrainerConfig
from acp_repro.pipeline.training.trainer import make_optimizer, train_step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("architecture", ["pro", "llama"])
def test_gpu_step_matches_cpu_step(architecture):
    """Both in float32, so only the summation order differs; then a compiled bfloat16 step runs."""

    def mean_loss(model, input_ids, labels):
        return model(input_ids, labels=labels).mean()

    make = getattr(FoXConfig, architecture)
    config = make(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_heads=2, log_pruning_tolerance=-10.0
    )
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, 64, (2, 256), generator=generator) for _ in range(2))
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = FoXForCausalLM(config).to(device)
        optimizer = make_optimizer(model, TrainerConfig(), 1e-3)
        batches = iter([(ids, labels)])
        loss, norm = train_step(model, optimizer, mean_loss, batches, 1, max_grad_norm=1.0, dtype="float32")
        results.append([loss.item(), norm.item()])
    assert results[1] == pytest.approx(results[0], rel=1e-4)
    for block in model.model.layers:
        block.compile(fullgraph=True)
    batches = iter([(ids, labels)])
    loss, _ = train_step(model, optimizer, mean_loss, batches, 1, max_grad_norm=1.0, dtype="bfloat16")
    assert loss.item() == pytest.approx(results[0][0], rel=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_under_checkpointing_are_bitwise_identical(compiled):
    """Blocks recomputed in the backward pass are bitwise identical to the forward pass."""
    config = FoXConfig.pro(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, num_heads=2, log_pruning_tolerance=-10.0
    )
    ids = torch.randint(0, 64, (2, 1000), generator=torch.Generator().manual_seed(0)).cuda()
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = FoXForCausalLM(config, gradient_checkpointing=checkpointing).cuda()
        for block in model.model.layers if compiled else ():
            block.compile(fullgraph=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model.loss_per_token(ids, ids.roll(-1, 1)).mean()
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.isfinite().all() and torch.equal(gradient, gradients[1][name]), name
