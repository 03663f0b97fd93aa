"""Eviction at equal bytes: surviving keys, the three treatments, and their figure and claim."""

import pandas as pd
import pytest
import torch

from acp_repro.attention.reference import attention_scores
from acp_repro.model.capture import attention_inputs
from acp_repro.papers.acp.measure import eviction
from acp_repro.papers.acp.paper import PAPER
from acp_repro.papers.acp.trained import PassSettings
from acp_repro.pipeline.data.text_checkpoint import labelled_batches
from analysis.acp import figure_eviction
from analysis.verdict import Word
from tests.test_heads import small_model

T, PROMPT = 512, 384


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def input_ids():
    return torch.randint(0, 256, (2, T), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def rows(model, input_ids):
    batches = [one for ids in input_ids.split(1) for one in labelled_batches(ids, torch.device("cpu"))]
    return pd.DataFrame(eviction.measure_eviction(model, batches, PassSettings("float32", "small")))


@pytest.fixture(scope="module")
def survivors(model, input_ids):
    scores = {policy: [] for policy in eviction.POLICIES}
    for layer, inputs in enumerate(attention_inputs(model, input_ids[:1])):
        eviction.add_scores(scores, PROMPT, layer, inputs)
    return scores, eviction.choose_keys(scores)


def test_policies_keep_at_most_the_bytes_of_acp(survivors):
    _, kept = survivors
    counts = {policy: sum(int(x.sum()) for x in layers) for policy, layers in kept.items()}
    assert 0 < counts["acp"] < 4 * PROMPT and counts["oracle"] == counts["acp"]
    for policy in ("window", "lru", "random", "h2o"):
        each = {int(n) for of_layer in kept[policy] for n in of_layer.sum(-1)}
        assert each == {counts["acp"] // 4}


def test_policies_keep_the_documented_tokens(survivors):
    _, kept = survivors
    each = int(kept["window"][0][0].sum())
    window = torch.arange(PROMPT)
    assert torch.equal(kept["window"][0][0], (window < 4) | (window >= PROMPT - each + 4))
    assert kept["random"][0][:, :64].all() and kept["random"][0][:, -64:].all()
    assert kept["h2o"][0][:, -(each // 2) :].all()


def test_treatments_match_the_dense_softmax(model, input_ids, survivors):
    _, kept = survivors
    inputs = attention_inputs(model, input_ids[:1])[1]
    of_layer = kept["random"][1]
    weights = attention_scores(inputs.q, inputs.k, inputs.log_fgate, sm_scale=0.25)[0, :, PROMPT:].softmax(-1)
    for treatment, factor in (("scaled", 0.1), ("masked", 0.0), ("removed", 0.0)):
        scaled = weights.clone()
        scaled[:, :, :PROMPT] *= torch.where(of_layer, 1.0, factor)[:, None]
        expected = scaled / scaled.sum(-1, keepdim=True) @ inputs.v[0]
        found = eviction.attend_late(inputs, of_layer, treatment)[0]
        assert (found - expected).abs().max() < 1e-5, treatment


def test_results_by_position_and_the_worst_row(model, rows):
    assert set(rows) == set(PAPER.metric("eviction").columns)
    assert len(rows) == 6 * 3 * 1 and (rows["measured_tokens"] == 2 * 128).all()
    assert (rows["kept_bytes"] < rows["full_bytes"]).all()
    acp = rows[rows["policy"] == "acp"]
    assert acp["largest_loss_increase_nats"].abs().max() < 1e-3
    assert (rows["largest_loss_increase_nats"] >= rows["loss_increase_nats"]).all()
    means = rows.set_index(["policy", "treatment"])["loss_nats"]
    assert means["window", "masked"] == pytest.approx(means["window", "removed"], abs=1e-5)
    assert means["random", "masked"] != means["random", "scaled"]
    assert not model.model.layers[0].attn.core._forward_hooks


def records(acp: float = 1e-5, removed: float = 0.0) -> pd.DataFrame:
    increases = dict(zip(eviction.POLICIES, (acp, 0.02, 0.03, 0.1, 0.01, 1e-6), strict=True))
    return pd.DataFrame(
        {
            "policy": policy,
            "treatment": treatment,
            "position": position,
            "loss_increase_nats": increase + removed * (treatment == "removed"),
            "largest_loss_increase_nats": 10 * increase,
        }
        for policy, increase in increases.items()
        for treatment in eviction.TREATMENTS
        for position in (0, 128)
    )


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (records(), Word.REPRODUCED),
        (records(acp=0.015), Word.CONTRADICTED),
        (records(removed=2e-3), Word.CONTRADICTED),
    ],
)
def test_claim_on_eviction(found, word):
    verdict = figure_eviction.acp_loses_least(found)
    assert verdict.word == word and verdict.n == 4
    figure_eviction.draw(found)
