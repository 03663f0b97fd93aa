"""A model on sequence shards, on ranks with gloo, against the model in one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from acp_repro.attention import gather_sequence, shard_sequence
from acp_repro.model import FoXCache, FoXConfig, FoXForCausalLM
from acp_repro.model.capture import attention_inputs
from acp_repro.pipeline.training.trainer import compiled_blocks
from tests.ranks import run_on

OPTIONS = [
    {},
    {"cu_seqlens": torch.tensor([0, 128, 200, 256, 384, 512])},  # documents end at chunk boundaries
    {"seq_start": torch.tensor([128])},
    {"seq_start": torch.tensor([300])},  # one rank's first chunk is padding
]


def loss_and_gradients(model, ids, labels, group, **options):
    """The loss of every token of the full sequence, and the gradients of all weights."""
    given = [ids, labels]
    if group is not None:
        given = [shard_sequence(x, group) for x in given]
    loss = model(given[0], labels=given[1], **options)
    grads = torch.autograd.grad(loss.sum(), [*model.parameters()])
    if group is not None:
        loss = gather_sequence(loss, group)
        for grad in grads:
            dist.all_reduce(grad, group=group)
    return loss.detach(), grads


def check_models():
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    for architecture in ("pro", "rope", "llama"):
        torch.manual_seed(0)
        tolerance = None if architecture == "rope" else -10.0
        # With fuse_training, a compiled block joins more projections than an eager one, so rounding differs.
        options = {"fuse_training": architecture != "pro", "log_pruning_tolerance": tolerance}
        shape = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
        model = FoXForCausalLM(getattr(FoXConfig, architecture)(**shape, **options))
        ids = torch.randint(50, (1, 513))
        ids, labels = ids[:, :-1], ids[:, 1:]
        for options in OPTIONS:
            model.set_context_parallel(None)
            loss, grads = loss_and_gradients(model, ids, labels, None, **options)
            model.set_context_parallel(group)
            shared, shared_grads = loss_and_gradients(model, ids, labels, group, **options)
            message = f"{architecture}, {options}"
            real = slice(int(options.get("seq_start", 0)), None)
            torch.testing.assert_close(shared[:, real], loss[:, real], rtol=0, atol=1e-5, msg=message)
            for a, b in zip(shared_grads, grads, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()), msg=message)
        if architecture == "pro":
            with compiled_blocks(model.model.layers, True, backend="aot_eager"):
                compiled, compiled_grads = loss_and_gradients(model, ids, labels, group, **options)
            assert torch.equal(compiled, shared) and all(map(torch.equal, compiled_grads, shared_grads))
    model.set_context_parallel(None)
    alone = attention_inputs(model, ids)
    model.set_context_parallel(group)
    for a, b in zip(attention_inputs(model, shard_sequence(ids, group)), alone, strict=True):
        assert torch.equal(a.threshold, b.threshold) and torch.equal(a.count().pruned, b.count().pruned)
    with pytest.raises(ValueError, match=r"set_context_parallel\(None\)"), torch.no_grad():
        model(ids, cache=FoXCache(2))
    dist.destroy_process_group()


def test_sharded_model_equals_the_unsharded_model():
    assert run_on(2, Path.cwd(), check_models) == [(0, "")] * 2
