"""The explorer's values: against the dense reference in float64, and as used by the page."""

import math

import pandas as pd
import pytest
import torch

from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.attention.reference import attention_scores, decay_bias, kept_entries
from acp_repro.common.errors import UsageError
from acp_repro.explorer import explore, weights
from acp_repro.explorer.heads import inspect_heads, weigh_heads
from acp_repro.explorer.weights import head_weights
from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.model.capture import attention_inputs


def small_model(architecture="pro", heads=2, **settings):
    """Two layers; the first head of each forgets fast and the last hardly."""
    torch.manual_seed(0)
    shape = {"vocab_size": 257, "hidden_size": 16 * heads, "num_hidden_layers": 2, "num_heads": heads}
    settings = {"log_pruning_tolerance": -10.0} | shape | settings
    model = FoXForCausalLM(getattr(FoXConfig, architecture)(**settings))
    with torch.no_grad():
        for block in model.model.layers:
            block.attn.fgate_proj.bias.copy_(torch.linspace(-3.0, 9.0, heads))
    return model


def dense(q, k, log_fgate, kept=None):
    """Attention weights A of one head, (T, T) in float64, from the reference."""
    q, k, gates = (x.double()[None, None] for x in (q, k, log_fgate))
    return attention_scores(q, k, gates, sm_scale=q.shape[-1] ** -0.5, kept=kept)[0, 0].softmax(-1)


@pytest.mark.parametrize(("length", "cell", "rows"), [(130, 16, 128), (257, 16, 128), (1000, 256, 384)])
@pytest.mark.parametrize("gate", [-6.0, 0.0, 4.0, 9.0])  # effective context from 1 token to the full past
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sums_match_the_dense_matrix(length, cell, rows, gate, dtype):
    """Rows in chunks that divide neither the length nor squares; float32 within its rounding of logits about
    20."""
    torch.manual_seed(1)
    q, k = (2 * torch.randn(length, 16, dtype=torch.float64) for _ in range(2))
    log_fgate = torch.nn.functional.logsigmoid(gate + torch.randn(length, dtype=torch.float64))
    c, delta = cumulative_log_fgate(log_fgate), torch.tensor(-12.0)
    grid = (64, 32)
    found = head_weights(
        q.to(dtype), k.to(dtype), c, delta, grid=grid, cell=cell, strongest=5, chunk_scores=length * rows
    )
    near = {"rtol": 1e-9, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 1e-7}

    def same(value, expected):
        torch.testing.assert_close(value.double(), expected, **near)

    exact = dense(q, k, log_fgate)
    weights, keys = exact.topk(5)
    same(found.weights, weights)
    if dtype == torch.float64:
        there = torch.arange(length)[:, None] >= torch.arange(5)
        assert torch.equal(found.keys, torch.where(there, keys, -1).int())
    # Under pruning: the remaining weights, normalised to 1.
    kept = kept_entries(found.boundary[None, None], length, length, *grid)
    pruned = dense(q, k, log_fgate, kept)
    same(found.pruned_mass, exact.masked_fill(kept[0, 0], 0.0).sum(-1))
    of_keys = found.keys.clamp(min=0).long()
    still = kept[0, 0].gather(1, of_keys) & (found.keys >= 0)
    same(
        (found.weights.double() / (1 - found.pruned_mass.double())[:, None]) * still,
        pruned.gather(1, of_keys) * still,
    )

    squares = torch.nn.functional.pad(exact, (0, -length % cell)).unflatten(1, (-1, cell)).sum(-1)
    same(found.cells, torch.stack([rows.mean(0) for rows in squares.split(cell)]))
    same(found.by_distance, torch.stack([exact.diagonal(-d).sum() / length for d in range(length)]))
    same(found.received, exact.sum(0))
    decay = decay_bias(log_fgate[None, None], length)[0, 0]
    assert torch.equal(found.first_kept, (decay < -12).sum(-1).int() - torch.arange(length - 1, -1, -1).int())


@pytest.mark.parametrize("architecture", ["pro", "llama"])
def test_heads_match_the_model_and_kinds_match_inspect(architecture):
    model, ids = small_model(architecture), torch.randint(0, 257, (3, 300))
    found = weigh_heads(model, ids.split(2))
    expected = inspect_heads(model, ids.split(2))
    pd.testing.assert_frame_equal(found.table[expected.columns], expected)
    assert [[head.layer, head.head] for head in found.heads] == expected[["layer", "head"]].values.tolist()
    assert torch.equal(found.input_ids, ids[0]) and found.length == 300 and found.cell == 2
    inputs = attention_inputs(model, ids[:1])
    for row, head in zip(found.table.itertuples(), found.heads, strict=True):
        of_layer = inputs[head.layer]
        exact = dense(of_layer.q[0, head.head], of_layer.k[0, head.head], of_layer.log_fgate[0, head.head])
        sampled = torch.arange(0, 300, 7)
        weights, _ = exact[sampled].topk(8)
        torch.testing.assert_close(head.weights.weights[sampled].double(), weights, rtol=1e-4, atol=1e-7)
        assert torch.equal(head.weights.boundary, of_layer.boundary(*found.grid)[0, head.head])
        assert row.strongest_weight == pytest.approx(float(exact.amax(1).mean()), rel=1e-4)
        assert row.first_token_weight == pytest.approx(float(exact[:, 0].mean()), rel=1e-4)
        assert row.largest_pruned_mass <= math.exp(-10)
        distance = (torch.arange(300)[:, None] - torch.arange(300)).clamp(min=0)
        near = torch.stack([exact[distance <= d].sum() / 300 for d in range(300)])
        assert row.half_weight_tokens == int((near < 0.5 + 1e-9).sum())
        assert row.previous_token_weight == pytest.approx(float(exact.diagonal(-1).sum()) / 300, rel=1e-4)


@pytest.mark.parametrize("cell", [16, 1024])
def test_memory_is_linear_in_the_length(monkeypatch, cell):
    largest, length = 0, 4096
    new_empty = torch.Tensor.new_empty

    def counted(self, *shape, **options):
        nonlocal largest
        made = new_empty(self, *shape, **options)
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", counted)
    q = torch.randn(length, 16)
    c = cumulative_log_fgate(torch.full((length,), -0.1))
    weights.head_weights(q, q, c, torch.tensor(-12.0), grid=(64, 64), cell=cell)
    assert 0 < largest <= weights.CHUNK_SCORES_CPU


def test_tokens_outside_the_vocabulary_are_rejected():
    model = small_model()
    for tokens, message in (
        ([0, 257], "token id 257 is not in the range 0 to 256; use the tokenizer"),
        (torch.full((2, 200), -1), "token id -1 is not in the range 0 to 256"),
        *((tokens, "tokens must be ids, .*encode a text") for tokens in ("a text", [], [0.5], [[0], [1, 2]])),
    ):
        with pytest.raises(UsageError, match=message):
            explore(model, tokens)
