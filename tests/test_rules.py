"""Skipped blocks and losses of published sparse-attention rules, against dense float64 computations."""

import json
import math
import re

import pytest
import torch

from acp_repro import inspect
from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.common.errors import UsageError
from acp_repro.explorer.blocks import BLOCK
from acp_repro.explorer.rule_table import COLUMNS, RuleSums, measure_rules
from acp_repro.explorer.rules import (
    RULES,
    HeadInputs,
    Tiles,
    skip_by_final_sum,
    skip_by_maximum,
    skip_by_running_sum,
    skip_rows_in_backward,
)
from acp_repro.explorer.weights import head_weights
from acp_repro.model import save_pretrained
from tests.test_heads import small_model

T = 384


def random_head(gate: float | None = 3.0, window: int | None = None, spread: float = 2.0) -> HeadInputs:
    generator = torch.Generator().manual_seed(0)
    q, k, values = (torch.randn(T, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    k += 0.3 * spread * torch.randn(T // 16, 16, generator=generator).repeat_interleave(16, 0)  # equal pages
    c = None
    if gate is not None:
        noise = torch.randn(T, generator=generator, dtype=torch.float64)
        c = cumulative_log_fgate(torch.nn.functional.logsigmoid(gate + noise))
    threshold = None if c is None else torch.tensor(-20.0, dtype=torch.float64)
    return HeadInputs(spread * q / 4, k, values.float(), c, threshold, window_size=window)


def dense_scores(head: HeadInputs) -> torch.Tensor:
    scores = head.q @ head.k.T
    if head.c is not None:
        scores += head.c[:, None] - head.c
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return scores.masked_fill((distance < 0) | (distance >= (head.window_size or T)), -math.inf)


def whole_tiles(head: HeadInputs, scores: torch.Tensor) -> Tiles:
    tiles = scores.softmax(1).unflatten(1, (-1, BLOCK))
    maxima = scores.unflatten(1, (-1, BLOCK)).amax(-1) / math.log(2)
    return Tiles(head, 0, T, maxima, tiles.amax(-1), tiles.sum(-1))


@pytest.mark.parametrize(("gate", "window"), [(3.0, None), (None, None), (None, 150)])
def test_losses_match_dense_attention(gate, window):
    head = random_head(gate, window)
    scores = dense_scores(head)
    weights, tiles = scores.softmax(1), whole_tiles(head, scores)
    exact, seen = weights @ head.values.double(), scores > -math.inf
    sums = RuleSums(head, RULES)
    parts = (head.q.float(), head.k.float(), head.c, None)
    sizes = {"grid": (BLOCK, BLOCK), "cell": T, "chunk_scores": 128 * T, "scaling": 1.0}
    head_weights(*parts, **sizes, window_size=window, sums=sums)
    found = {row["rule"]: row for row in sums.rows()}
    assert len(found) == len(RULES) - 2 * (gate is None)
    for rule in RULES:
        if rule.name not in found or rule.name == "random half":
            continue
        skipped = rule.skip(tiles).repeat_interleave(rule.rows, 0).repeat_interleave(rule.keys, 1)[:, :T]
        lost = (weights * skipped).sum(1)
        kept = weights * ~skipped
        out = (kept / kept.sum(1, keepdim=True).clamp(min=1e-300)) @ head.values.double()
        error = (out - exact).abs().max() / head.values.abs().max()
        row = found[rule.name]
        assert row["worst_row_loss"] == pytest.approx(float(lost.max()), rel=1e-4, abs=1e-12), rule.name
        assert row["mean_row_loss"] == pytest.approx(float(lost.mean()), rel=1e-4, abs=1e-12), rule.name
        assert row["output_error"] == pytest.approx(float(error), rel=1e-2, abs=1e-9), rule.name
        if rule.keys == 1:  # pairs of tokens
            assert row["skipped"] == pytest.approx(float(skipped[seen].float().mean())), rule.name
        assert 0 <= row["certified_skipped"] <= 1


@pytest.mark.parametrize("gate", [None, 3.0])
@pytest.mark.parametrize("threshold", [1e-3, 0.3, 4.0])
@pytest.mark.parametrize("leftwards", [False, True])
def test_skip_softmax_matches_a_loop_over_tiles(gate, threshold, leftwards):
    """Covers a threshold above 1, which skips a tile above the running maximum."""
    head = random_head(gate, spread=6.0)
    tiles = whole_tiles(head, dense_scores(head))
    found = skip_by_maximum(tiles, threshold, leftwards=leftwards)
    for m, maxima in enumerate(tiles.blocks(tiles.maxima)):
        running = torch.full((BLOCK,), -math.inf)
        for n in range(m, -1, -1) if leftwards else range(m + 1):
            skipped = bool((maxima[:, n] < running + math.log2(threshold)).all())
            assert bool(found[m, n]) == skipped
            running = running if skipped else running.maximum(maxima[:, n])


@pytest.mark.parametrize("threshold", [1e-2, 1.0])
def test_flash_sparse_attention_backward_skips_the_blocks_of_its_forward(threshold):
    head = random_head(spread=4.0)
    tiles = whole_tiles(head, dense_scores(head))
    forward, backward = (skip(tiles, threshold) for skip in (skip_by_running_sum, skip_by_final_sum))
    assert bool(forward.any()) and bool((forward <= backward).all())


def test_model_optimizer_backward_gives_long_rows_no_gradient():
    """Flat scores of 256 keys, threshold 0.05: a row of more than 20 keys has no weight above it."""
    weights = (torch.ones(256, 256).tril() / torch.arange(1, 257)[:, None]).unflatten(1, (-1, BLOCK))
    maxima = torch.zeros(256, 4)
    tiles = Tiles(random_head(), 0, 256, maxima, weights.amax(-1), weights.sum(-1))
    assert not skip_by_maximum(tiles, 0.05).tril().any()
    assert int(skip_rows_in_backward(tiles, 0.05).all(1).sum()) == 236


def test_certified_rules_lose_less_than_epsilon_in_every_head_of_a_model():
    model = small_model()
    table = measure_rules(model, torch.randint(0, 256, (1, 400)))
    assert {*table["rule"]} == {rule.name for rule in RULES}
    worst = table.groupby("rule")["worst_row_loss"].max()
    for name, epsilon in (("e-10", math.exp(-10)), ("1e-3", 1e-3), ("1e-2", 1e-2)):
        assert worst[f"certified, {name}"] < epsilon
    assert worst["ACP"] < math.exp(-10) and worst["oracle, 1e-2"] < 1e-2
    skipped = table.groupby("rule")["skipped"].mean()
    assert (
        0
        < skipped["ACP"]
        <= skipped["certified, e-10"]
        <= skipped["certified, 1e-2"]
        <= skipped["oracle, 1e-2"]
    )
    for tokens in (torch.zeros(255, dtype=torch.long), torch.zeros(2, 256, dtype=torch.long)):
        with pytest.raises(UsageError, match="one sequence of 256 tokens or more"):
            measure_rules(model, tokens)


def test_rules_command_writes_a_head_map_and_its_page(tmp_path, capsys):
    save_pretrained(small_model(), tmp_path / "small")
    (tmp_path / "text.txt").write_text("a text of some tokens. " * 50)
    file, page = tmp_path / "map.json", tmp_path / "page.html"
    where = ["--text", str(tmp_path / "text.txt"), "--rules", str(file), "--html", str(page)]
    assert inspect.main([str(tmp_path / "small"), "--context-length", "300", *where]) == 0
    written = json.loads(file.read_text())
    assert written["tokens"] == 256 and written["model"] == "small" and written["text"] == "text.txt"
    assert [rule["name"] for rule in written["rules"]] == [rule.name for rule in RULES]
    assert [(head["layer"], head["head"]) for head in written["heads"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {*written["heads"][0]["rules"]["ACP"]} == {*COLUMNS}
    about = re.search(r'id="about">(.*?)</script>', page.read_text())
    assert about and json.loads(about[1])["models"][0]["rules"] == written
    printed = capsys.readouterr().out
    assert all(rule.name in printed for rule in RULES) and "not computable: SeerAttention" in printed
