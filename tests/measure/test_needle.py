"""The needle test: prompts to a model, and the resulting metrics."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.papers.acp.measure import losses
from acp_repro.papers.acp.measure.needle import measure_needle
from acp_repro.papers.acp.paper import PAPER
from acp_repro.papers.acp.task import FoXTask
from acp_repro.papers.acp.trained import TrainedFoX
from acp_repro.pipeline.needle import trial
from acp_repro.pipeline.needle.prompt import WORDINGS, hide, tokenise_needles
from acp_repro.pipeline.suite_file import load_suite
from tests.measure.test_needle_text import BYTES, DEED, LENGTH, NEEDLES, bytes_needle
from tests.suites import with_measure

# --- asking a model


class Copier(torch.nn.Module):
    """Perfect retrieval: copies what followed the last occurrence of the prompt's final eight bytes, or x."""

    def __init__(self):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.config = FoXConfig.pro(vocab_size=257, hidden_size=16, num_hidden_layers=1, num_heads=1)
        self.ids = None

    def check_input_ids(self, input_ids):
        pass

    def forward(self, input_ids, cache=None, *, return_hidden, seq_start=None):
        assert return_hidden
        continues = cache is not None and input_ids.shape[1] == 1
        self.ids = torch.cat([self.ids, input_ids], 1) if continues else input_ids
        rows = [self._next(row.tolist()) for row in self.ids]
        return torch.stack([row[-input_ids.shape[1] :] for row in rows])[..., None]

    def _next(self, row):
        """The byte after each position; a wrong byte for unseen contexts."""
        seen, following = {}, torch.full((len(row),), ord("x"))
        for end in range(8, len(row) + 1):
            key = tuple(row[end - 8 : end])
            following[end - 1] = seen.get(key, ord("x"))
            if end < len(row):
                seen[key] = row[end]
        return following

    def lm_head(self, hidden):
        return 20.0 * torch.nn.functional.one_hot(hidden.squeeze(-1).long(), 257).float()


def ask(model, trials=None, **changes):
    hay = BYTES.encode("the fox and the dog. " * 100).astype(np.int64)
    arguments = {"decode": BYTES.decode, "dtype": "float32", "batch_tokens": 1500, "description": ""}
    trials = trials or hide([bytes_needle()], [hay, hay[21:]])
    return trial.try_needle(model, trials, [700, 600], [0, 0.5, 1], **arguments | changes)


def test_facts_are_assigned_to_haystacks_in_turn():
    needles = tokenise_needles(BYTES.encode, BYTES.bos_id, "facts")
    hay = BYTES.encode("the fox and the dog. " * 100).astype(np.int64)
    trials = hide(needles, [hay, hay[21:]])
    assert [(t.fact, t.haystack_sample) for t in trials] == [(i, i % 2) for i in range(len(needles))]
    rows = ask(Copier(), trials=trials[:3])
    assert [row["fact"] for row in rows[:9]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for row in rows:
        deed = WORDINGS["facts"][row["fact"]].deed
        assert row["answer"] == f"{deed}." and row["answer_recall"] == row["exact_match"] == 1


def test_copying_model_finds_every_needle():
    rows = ask(Copier())
    keys = [(r["evaluated_length_tokens"], r["haystack_sample"], r["depth"]) for r in rows]
    assert keys == [(n, s, d) for n in (600, 700) for s in (0, 1) for d in (0, 0.5, 1)]
    for row in rows:
        assert row["answer_recall"] == 1 and row["exact_match"] == 1 and row["answer"] == DEED + "."
        # Every byte has probability e^20 / (e^20 + 256); without the needle almost none is predicted.
        right = -len(f" {DEED}.") * math.log1p(256 * math.exp(-20))
        assert row["answer_log_likelihood_nats"] == pytest.approx(right, abs=1e-4)
        assert row["answer_log_likelihood_without_needle_nats"] < -800


def test_likelihood_matches_the_full_forward():
    torch.manual_seed(0)
    model = FoXForCausalLM(FoXConfig.pro(vocab_size=257, hidden_size=32, num_hidden_layers=2, num_heads=2))
    prompts, answer = torch.randint(0, 256, (2, 40)), torch.randint(0, 256, (5,))
    with torch.no_grad():
        found = trial.answer_log_likelihood(model, prompts, answer)
        whole = torch.cat([prompts, answer.expand(2, -1)], 1)
        losses = model.loss_per_token(whole[:, :-1], whole[:, 1:])[:, -5:]
    torch.testing.assert_close(found, -losses.sum(1), rtol=1e-5, atol=1e-5)


# --- the metrics


@pytest.fixture
def trained(make_suite, tmp_path):
    """A run of a tiny suite without its exact pair, with fresh weights."""
    text = NEEDLES.replace("[-10, null], needle_fraction: [0, 0.5]", "[-10]").replace(f"{LENGTH}]", "512]")
    make_suite(text)
    (tmp_path / "heldout.txt").write_text("a dog that forgets is a fox. " * 100)
    suite = with_measure(load_suite("mini"), needle_depths=[0.0, 1.0], needle_samples=1, needle_lengths=[500])
    torch.manual_seed(0)
    task = FoXTask(suite.runs[0])
    return TrainedFoX(suite, suite.runs[0], task, task.build(), torch.device("cpu"), 0)


def test_one_model_is_evaluated_with_and_without_pruning(trained):
    rows = measure_needle(trained)
    assert {frozenset(row) for row in rows} == {frozenset(PAPER.metric("needle").columns)}
    assert [row["method"] for row in rows] == ["acp"] * 2 + ["exact"] * 2
    assert trained.model.config.log_pruning_tolerance == -10
    gaps = [
        abs(a["answer_log_likelihood_nats"] - b["answer_log_likelihood_nats"])
        for a, b in zip(rows[:2], rows[2:], strict=True)
    ]
    assert max(gaps) < 0.01  # epsilon is e^-10


@pytest.mark.parametrize("tolerance", [-10.0, -0.001])
def test_same_weights_differ_only_under_effective_pruning(trained, tolerance):
    trained.run = dataclasses.replace(trained.run, log_pruning_tolerance=tolerance)
    trained.model.set_log_pruning_tolerance(tolerance)
    scales = {"q_norm.weight": 0.1, "k_norm.weight": 0.1, "fgate_proj.weight": 0.0}
    with torch.no_grad():  # small delta and equal forgetting in all heads, so pruned weights are noticeable
        for name, weight in trained.model.named_parameters():
            weight.mul_(scales.get(".".join(name.split(".")[-2:]), 10.0 if weight.ndim == 2 else 1.0))
        for block in trained.model.model.layers:
            block.attn.fgate_proj.bias.fill_(3.0)
    before = copy.deepcopy(trained.model.state_dict())
    rows = losses.measure_same_weights(trained)
    assert {frozenset(row) for row in rows} == {frozenset(PAPER.metric("same_weights").columns)}
    loss, noise, needle = rows
    assert 0 < noise["largest_difference_nats"] < 1e-4 and noise["differing_items"] > 100
    if tolerance == -10:
        assert max(row["largest_difference_nats"] for row in (loss, needle)) < 1e-4
    else:  # fails if both are measured with pruning or both without
        assert loss["largest_difference_nats"] > 5 * noise["largest_difference_nats"]
        assert needle["differing_items"] == needle["items"] == 2 and needle["largest_difference_nats"] > 1e-3
    assert trained.model.config.log_pruning_tolerance == tolerance
    assert all(torch.equal(before[name], now) for name, now in trained.model.state_dict().items())


@pytest.mark.parametrize("pruned", [True, False])
def test_log_is_thinned_to_its_evaluations(trained, pruned):
    if not pruned:
        trained.run = dataclasses.replace(trained.run, log_pruning_tolerance=None)
    folder = trained.run.folder
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"device": "a chip"}))
    lines = [
        {"step": i, "tokens": 10 * (i + 1), "loss_nats": float(i), "grad_norm": 1.0}
        | {"throughput_tokens_per_s": 1e3 + i}
        | ({"pruned_ratio": [0.1, i / 1000]} if pruned and i % 2 == 0 else {})
        for i in range(401)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = losses.measure_training_log(trained)
    assert {frozenset(row) for row in rows} == {frozenset(PAPER.metric("training_log").columns)}
    steps = sorted({row["step"] for row in rows})
    assert steps[-1] == 400 and len(steps) <= 100 and {row["training_device"] for row in rows} == {"a chip"}
    if pruned:  # every third of 201 evaluations, counted from the last
        assert steps == list(range(400 % 6, 401, 6)) and [row["layer"] for row in rows[:2]] == [0, 1]
        assert rows[-1]["pruned_ratio"] == 0.4
    else:
        assert {(row["layer"], row["pruned_ratio"]) for row in rows} == {(None, None)}
    gap = steps[1] - steps[0]
    assert rows[-1]["averaged_steps"] == gap and rows[-1]["loss_nats"] == 400 - (gap - 1) / 2
    assert rows[-1]["throughput_tokens_per_s"] == 1400 - (gap - 1) / 2
    each = losses.measure_step_losses(trained)
    assert [row["step"] for row in each] == list(range(401)) and each[-1]["loss_nats"] == 400
