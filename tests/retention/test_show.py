"""``python -m acp_repro.retention.show``: the tokens that each gate keeps."""

from pathlib import Path

from acp_repro.retention import show
from acp_repro.retention.show import visible

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "pretrained/ar-tiny-stdlib"
TEXT = "    def connection_lost(self, exc):\n        self._loop.call_soon(self._transport.close)\n" * 2


def test_dropped_characters_are_shown_as_dots():
    offsets = [(0, 0), (0, 3), (4, 7), (8, 11), (0, 0)]
    assert visible("one two\nsix", offsets, [True, True, False, True, False]) == "one····\nsix"
    for kept in ([True, False, True], [False, True, True], [True, True, False]):
        assert visible("日", [(0, 1)] * 3, kept) == "·"  # three tokens of a character


def test_model_of_the_project_is_shown(capsys):
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 4_000_000
    for budget in (30, 10):
        assert show.main([str(SHIPPED), "--text", TEXT, "--budget", str(budget / 100)]) == 0
        said = capsys.readouterr().out
        tokens = int(said.split()[0])
        assert f"{budget * tokens // 100} of {tokens} tokens" in said and "asyncio" in said
