"""The command that shows which tokens of a text a model keeps."""

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
        groups = dict(group_by_gate(built, memory, row))
        assert sum(map(len, groups.values())) == int(memory.lengths[row])
        assert groups["kept"] == memory.tokens[row]
