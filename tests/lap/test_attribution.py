"""SHAP values of kept vectors."""

import pytest

pytest.importorskip("shap", reason="pip install -e '.[lap]'")


import numpy as np
import torch

from acp_repro.lap.attribution import game, shap_values
from acp_repro.lap.decoder import decode_teacher
from acp_repro.papers.lap.measure.attribution import select_pairs
from tests.lap.tiny import TEXTS, model


@pytest.mark.slow
def test_shap_values_sum_to_the_value_of_the_full_memory():
    built = model(max_length=24)
    row = built.token_ids([TEXTS[0]])[0].tolist()
    found = shap_values(built, row, 200)
    value, memory, written = game(built, row)
    players = int(memory.kept[0])
    assert found.values.shape == (players, len(written)) and found.written == written
    assert found.positions == memory.positions[0].tolist()
    ends = value(np.stack([np.zeros(players), np.ones(players)]))
    np.testing.assert_allclose(found.values.sum(0), ends[1] - ends[0], atol=1e-4)


def test_coalition_value_is_the_log_probability_of_the_written_tokens():
    built = model(max_length=24)
    row = built.token_ids([TEXTS[0]])[0].tolist()
    value, memory, written = game(built, row)
    players = int(memory.kept[0])
    assert written[-1] == built.t5.config.eos_token_id
    inputs, window = built.shift_right(torch.tensor([written])), built.pruning.decoder_window
    with torch.no_grad():
        whole = decode_teacher(built.t5, memory.vectors, memory.mask, inputs, window)
        none = decode_teacher(built.t5, memory.vectors[:, :1] * 0, memory.mask[:, :1] * 0, inputs, window)
        part = memory.mask.clone()
        part[0, 1] = -torch.inf
        one_out = decode_teacher(built.t5, memory.vectors, part, inputs, window)
    others = np.ones(players)
    others[1] = 0
    for coalition, logits in ((np.ones(players), whole), (others, one_out), (np.zeros(players), none)):
        expected = logits[0].log_softmax(-1)[range(len(written)), written]
        np.testing.assert_allclose(value(coalition[None])[0], expected, rtol=1e-5, atol=1e-5)


def test_zero_pairs_are_omitted_but_every_token_is_recorded():
    values = np.array([[0.0, 0.3, 0.0], [0.0, 0.0, 0.0], [-0.2, 0.0, 0.0]])
    np.testing.assert_array_equal(select_pairs(values), [[1, 1, 1], [1, 0, 0], [1, 0, 0]])
