"""The kernels of a training step against float64, to the last bit if the input dtype allows it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_helpers import relative_error

from acp_repro.model import linear_cross_entropy
from acp_repro.model.swiglu import _backward, swiglu_backward_op

kernels = pytest.importorskip("acp_repro.model.training_kernels", reason="pip install triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
IGNORED = -100
# Twice one rounding to nearest; the interpreter truncates, which doubles the error.
BUDGET = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7}


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 17, 259)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_backward(shape, dtype, poisoned):
    *rows, width = shape
    gate_up = (3 * torch.randn(*rows, 2 * width, device=DEVICE)).to(dtype)
    grad = torch.randn(*rows, width, device=DEVICE).to(dtype)
    given = gate_up.double().requires_grad_()
    gate, up = given.chunk(2, -1)
    product = F.silu(gate) * up
    (right,) = torch.autograd.grad(product, given, grad.double())
    for found in (kernels.swiglu_backward(gate_up, grad), swiglu_backward_op(gate_up, grad)):
        assert found[0].dtype == found[1].dtype == dtype
        assert relative_error(found[0], right) < BUDGET[dtype]
        assert relative_error(found[1], product) < BUDGET[dtype]
    torch.testing.assert_close(_backward(gate_up.double(), grad.double()), (right, product.detach()))


@pytest.mark.parametrize(
    ("rows", "vocabulary", "columns"), [(1, 2, 8), (3, 50, 64), (2, 8192, 8192), (5, 20_000, 20_032)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabulary_softmax(rows, vocabulary, columns, dtype, poisoned):
    logits = (5 * torch.randn(rows, columns, device=DEVICE)).to(dtype)
    logits[:, vocabulary:] = torch.nan  # padding rows of the vocabulary
    if vocabulary > 8192:
        logits[0, :8192] = -torch.inf  # the first chunk may have zero probability
    labels = torch.randint(vocabulary, (rows,), device=DEVICE)
    if vocabulary > 8192:
        labels[0] = vocabulary - 1
        labels[1] = IGNORED
    weights = torch.randn((), device=DEVICE).expand(rows)
    given = logits[:, :vocabulary].double().requires_grad_()
    right = F.cross_entropy(given, labels, ignore_index=IGNORED, reduction="none")
    (right_grad,) = torch.autograd.grad(right, given, weights.double())
    loss, lse = kernels.cross_entropy(logits, labels, vocabulary, IGNORED)
    torch.testing.assert_close(loss.double(), right.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), given.detach().logsumexp(-1), rtol=1e-6, atol=1e-6)
    grad = kernels.logits_grad(logits, labels, lse, weights, vocabulary, IGNORED)
    assert grad.dtype == dtype and not grad[:, vocabulary:].any()
    # p is a difference of two numbers near 10, and the label's entry is p - 1.
    right_grad = right_grad.float()
    torch.testing.assert_close(grad[:, :vocabulary].float(), right_grad, rtol=2 * BUDGET[dtype], atol=1e-5)


def test_invalid_labels_and_nan_logits_give_a_nan_loss():
    logits, labels = torch.zeros(4, 8, device=DEVICE), torch.tensor([0, 8, -1, 7], device=DEVICE)
    logits[3, 2] = torch.nan
    loss, _ = kernels.cross_entropy(logits, labels, 8, IGNORED)
    assert loss.isnan().tolist() == [False, True, True, True]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU: run make test-gpu on a machine with one")
@pytest.mark.parametrize("vocab", [50, 20_000])
def test_loss_of_a_vocabulary_head(vocab):
    hidden = torch.randn(2, 33, 64, device=DEVICE, requires_grad=True)
    weight = (0.2 * torch.randn(vocab, 64, device=DEVICE)).requires_grad_()
    labels = torch.randint(vocab, (2, 33), device=DEVICE)
    labels[1, 5:9] = IGNORED

    def results(loss):
        return loss, *torch.autograd.grad(loss.mean(), (hidden, weight))

    right = results(F.cross_entropy((hidden @ weight.T).transpose(1, 2), labels, reduction="none"))
    for found, expected in zip(results(linear_cross_entropy(hidden, weight, labels, 7)), right, strict=True):
        assert relative_error(found, expected) < 1e-4
    with torch.autocast(DEVICE, torch.bfloat16):
        for found, expected in zip(
            results(linear_cross_entropy(hidden, weight, labels, 7)), right, strict=True
        ):
            assert relative_error(found, expected) < 2e-2
