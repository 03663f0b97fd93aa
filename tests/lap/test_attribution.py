"""SHAP values of kept vectors."""

import pytest

pytest.importorskip("shap", reason="pip install -e '.[lap]'")

import numpy as np

from acp_repro.lap.attribution import game, shap_values
from tests.lap.tiny import TEXTS, model


def test_values_add_up_to_what_the_whole_memory_is_worth():
    built = model(max_length=24)
    row = built.token_ids([TEXTS[0]])[0].tolist()
    found = shap_values(built, row, 200)
    value, memory, written = game(built, row)
    players = int(memory.kept[0])
    assert found.values.shape == (players, len(written)) and found.written == written
    assert found.positions == memory.positions[0].tolist()
    ends = value(np.stack([np.zeros(players), np.ones(players)]))
    np.testing.assert_allclose(found.values.sum(0), ends[1] - ends[0], atol=1e-4)


def test_a_vector_that_nobody_can_see_is_worth_nothing():
    """Against all coalitions of a memory with one masked vector."""
    built = model(max_length=24)
    row = built.token_ids([TEXTS[1]])[0].tolist()
    value, memory, _ = game(built, row)
    players = int(memory.kept[0])
    memory.mask[0, 0] = -1e9
    coalitions = np.stack([np.ones(players), np.ones(players)])
    coalitions[1, 0] = 0
    with_it, without = value(coalitions)
    np.testing.assert_allclose(with_it, without, atol=1e-5)
    whole, _, _ = game(built, row)
    assert np.abs(whole(coalitions)[0] - whole(coalitions)[1]).max() > 1e-4
