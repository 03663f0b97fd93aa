"""The command that shows which tokens of a text a model keeps."""

import torch

from acp_repro.lap.compress import group_by_gate, mark_tokens
from tests.lap.tiny import TEXTS


def test_tokens_are_shown_exactly_once(built):
    texts = [*TEXTS, "日本 🎉 café"]  # their tokens are bytes, which a mark must not separate
    memory = built.encode(texts)
    for row, text in enumerate(texts):
        plain = mark_tokens(built, memory, row)
        for gate in range(1, memory.gates + 1):
            plain = plain.replace(f"]{gate}", "")
        assert plain.replace("[", "") == text
        groups = group_by_gate(built, memory, row)
        assert [name for name, _ in groups] == ["gate 1 drops", "gate 2 drops", "kept"]
        assert sum(len(tokens) for _, tokens in groups) == int(memory.lengths[row])
        assert groups[-1][1] == memory.tokens[row]


def test_multi_token_character_is_marked_by_its_first_gate(built):
    memory = built.encode(["日"])
    assert memory.lengths.tolist() == [4]  # three bytes and EOS
    memory.dropped_by[:] = torch.tensor([[-1, 1, 0, -1]])
    assert mark_tokens(built, memory, 0) == "[日]1"
    memory.dropped_by[:] = torch.tensor([[-1, -1, -1, -1]])
    assert mark_tokens(built, memory, 0) == "日"
