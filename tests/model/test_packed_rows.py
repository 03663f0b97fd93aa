"""Documents packed into one row equal separate documents: logits, losses, gradients."""

import pytest
import torch
from model_helpers import SMALL, relative_error

from acp_repro.model.capture import watch_attention

LENGTHS = (1, 63, 65, 1, 40, 0, 2)


@pytest.fixture
def documents():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, SMALL["vocab_size"], (1, n), generator=generator) for n in LENGTHS if n]


@pytest.fixture
def cu_seqlens():
    return torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0)


@pytest.mark.parametrize("small_config", ["pro", "llama", "rope"], indirect=True)
@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow), "recomputed"])
def test_packed_documents_equal_separate_documents(small_model, documents, cu_seqlens, how):
    row = torch.cat(documents, 1)
    labels = row.roll(-1, 1)
    labels[0, cu_seqlens[1:].long() - 1] = -100
    alone = torch.cat([small_model(d) for d in documents], 1)
    right = torch.nn.functional.cross_entropy(alone.mT, labels, reduction="none")
    wanted = torch.autograd.grad(right.sum(), list(small_model.parameters()))
    torch.compiler.reset()
    call = small_model
    if how == "compiled":
        call = torch.compile(small_model, backend="eager", fullgraph=True)
    small_model.gradient_checkpointing = how == "recomputed"
    if how == "eager":
        assert relative_error(call(row, cu_seqlens=cu_seqlens), alone) < 1e-5
    loss = call(row, labels=labels, cu_seqlens=cu_seqlens)
    assert relative_error(loss, right) < 1e-5
    for found, expected in zip(
        torch.autograd.grad(loss.sum(), list(small_model.parameters())), wanted, strict=True
    ):
        assert relative_error(found, expected) < 1e-4


@torch.no_grad()
def test_blocks_of_other_documents_count_as_pruned(small_model, documents, cu_seqlens):
    small_model.set_log_pruning_tolerance(None)
    seen = []
    with watch_attention(small_model, lambda _, inputs: seen.append(inputs.boundary(64, 64))):
        small_model(torch.cat(documents, 1), cu_seqlens=cu_seqlens)
    # Blocks start at rows 64, 128 and 129, with documents that start at 64, 64 and 129.
    assert len(seen) == SMALL["num_hidden_layers"]
    assert all((boundary == torch.tensor([0, 1, 1])).all() for boundary in seen)
