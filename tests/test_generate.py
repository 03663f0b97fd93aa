"""The command that continues a text, and its streamed text pieces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acp_repro.generate import DEFAULT_PROMPT, cut_at_stop, main, stream_text
from acp_repro.model import BPETokenizer, ByteTokenizer, load_pretrained

TEXTS = st.text(max_size=30) | st.text("aé€🙂🙃\n ", max_size=30)


@pytest.fixture(autouse=True)
def threads():
    """The command sets them for a small model."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bpe(small_fox):
    pytest.importorskip("tokenizers", reason="pip install -e '.[bpe]'")
    return BPETokenizer((small_fox / "tokenizer.json").read_text(encoding="utf-8"))


def check_pieces(tokenizer, text):
    pieces = list(stream_text(tokenizer, tokenizer.encode(text).tolist()))
    assert "".join(pieces) == text
    assert all(pieces)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    return pieces


@settings(deadline=None)
@given(TEXTS)
def test_byte_tokens_stream_whole_characters(text):
    pieces = check_pieces(ByteTokenizer(), text)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert len(pieces) == len(text)  # each character as soon as its last byte arrives


def test_bpe_tokens_stream_whole_characters(bpe):
    @settings(deadline=None)
    @given(TEXTS)
    def check(text):
        check_pieces(bpe, text)

    check()


@settings(deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4)))
def test_stop_strings_truncate_at_the_first_match(pieces, stops):
    shown, text = "".join(cut_at_stop(pieces, stops)), "".join(pieces)
    if not any(one in text for one in stops):
        assert shown == text
    else:
        assert text.startswith(shown) and shown != text and not any(one in shown for one in stops)


def test_generate_command_continues_and_is_reproducible_by_seed(bpe, small_fox, capsys):
    def written(*options):
        assert main([str(small_fox), "--max-new-tokens", "12", *options]) == 0
        return capsys.readouterr()

    one = written("--seed", "7")
    assert one.out.startswith(DEFAULT_PROMPT) and len(one.out) > len(DEFAULT_PROMPT) + 12 and not one.err
    assert written("--seed", "7").out == one.out != written("--seed", "8").out
    greedy = written("--temperature", "0", "--prompt", "It was")
    assert greedy.out == written("--prompt", "It was", "--top-k", "1").out
    unseeded = written("--prompt", "It was")
    seed = unseeded.err.removeprefix("seed: ").strip()
    assert written("--prompt", "It was", "--seed", seed).out == unseeded.out


def test_generate_command_stops_at_strings_and_at_tokens(bpe, small_fox, capsys):
    def written(*options):
        arguments = [str(small_fox), "--prompt", "It was", "--temperature", "0", "--max-new-tokens", "25"]
        assert main([*arguments, *options]) == 0
        return capsys.readouterr().out

    whole = written().removeprefix("It was").rstrip("\n")
    stop = whole[9:12]
    assert written("--stop", stop) == f"It was{whole[: whole.index(stop)]}\n"
    token = int(load_pretrained(small_fox).generate(torch.tensor([bpe.prompt("It was")]), 6, 0.0)[0, -1])
    shorter = written("--stop", str(token)).removeprefix("It was").rstrip("\n")
    assert whole.startswith(shorter) and len(shorter) < len(whole)
