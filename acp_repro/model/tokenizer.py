"""The tokenizers of models: bytes, or byte-pair encoding from a ``tokenizer.json``. Needs no torch.

Both tokenizers decode to exactly the encoded text, need no unknown token, and have a BOS that no text encodes
to. Every training sequence begins with BOS, so a model must always read it first: ``prompt`` puts it there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from acp_repro.common.errors import UsageError

TOKENIZER_FILE = "tokenizer.json"
GPT2_BOS = "<|endoftext|>"
_PIECE_BYTES = 1 << 20
HALF = "\ufffd"  # the output of a tokenizer for an incomplete character
MOST_PARTS = 8  # the maximum number of tokens joined to complete a character of up to four bytes


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is BOS."""

    name = "bytes"
    vocab_size = 257
    bos_id = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of ``text``: shape (tokens,), dtype uint8; BOS is never among them."""
        return np.frombuffer(_as_bytes(text), dtype=np.uint8)

    def encode_many(self, texts: list[str]) -> list[np.ndarray]:
        """`encode` of each text: a list of (tokens,) uint8."""
        return [self.encode(text) for text in texts]

    def prompt(self, text: str | bytes) -> list[int]:
        """BOS and then `encode`: the ids that a model reads."""
        return [self.bos_id, *self.encode(text).tolist()]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; BOS gives no text, half a character becomes U+FFFD."""
        return bytes(i for i in map(int, ids) if i != self.bos_id).decode(errors="replace")


class BPETokenizer:
    """Byte-level BPE as in GPT-2, kept as the JSON text of the library `tokenizers`.

    Args:
        json_text: the content of a ``tokenizer.json``.
        bos: the token in front of a text, if the vocabulary has it; GPT-2's is its last id, 50256. Else BOS
            is one more id after the library's last, and ``vocab_size`` counts it, as in this project's files.

    Raises:
        UsageError: ``json_text`` is not a tokenizer of that library. It is a ValueError.
        ImportError: the library is not installed.
    """

    def __init__(self, json_text: str, bos: str = GPT2_BOS):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ModuleNotFoundError(
                "byte-pair encoding needs the library tokenizers: `pip install tokenizers`", name="tokenizers"
            ) from error
        try:
            self._bpe = Tokenizer.from_str(json_text)
        except Exception as error:  # tokenizers raises plain Exceptions
            raise UsageError(f"not a file of the library `tokenizers` ({error}); copy it again") from error
        self.json_text = json_text
        # "<|endoftext|>" inside a text is encoded as thirteen characters, never as BOS.
        self._bpe.encode_special_tokens = True
        # Encoding neither truncates nor pads a text, and adds no special tokens.
        self._bpe.no_padding()
        self._bpe.no_truncation()
        size, given = self._bpe.get_vocab_size(), self._bpe.token_to_id(bos)
        self.bos_id = size if given is None else given
        self.vocab_size = size + (given is None)
        ids = [self._bpe.token_to_id(token) for token in ("Hello", "Ġworld", GPT2_BOS)]
        is_gpt2 = [self.vocab_size, *ids] == [50257, 15496, 995, 50256]
        self.name = "gpt2" if is_gpt2 else f"bpe{self.vocab_size}"

    def __contains__(self, token: str) -> bool:
        return self._bpe.token_to_id(token) is not None

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of ``text``: shape (tokens,), dtype uint32; BOS is never among them."""
        ids = [
            # encode_batch_fast skips the character offsets, which take half of the time
            np.array(self._bpe.encode_batch_fast([piece], add_special_tokens=False)[0].ids, dtype=np.uint32)
            for piece in split_lines(_as_bytes(text))
        ]
        return np.concatenate(ids) if ids else np.empty(0, np.uint32)

    def encode_many(self, texts: list[str]) -> list[np.ndarray]:
        """`encode` of each of many short texts, (tokens,) uint32: one call of the library, outside Python's
        lock."""
        encoded = self._bpe.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def prompt(self, text: str | bytes) -> list[int]:
        """BOS and then `encode`: the ids that a model reads."""
        return [self.bos_id, *self.encode(text).tolist()]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; BOS gives no text, half a character becomes U+FFFD."""
        return self._bpe.decode([i for i in map(int, ids) if i != self.bos_id])


Tokenizer = ByteTokenizer | BPETokenizer


def split_lines(data: bytes) -> Iterator[str]:
    """UTF-8 text in pieces of about a megabyte that end with a line.

    The library keeps some hundred bytes for each token of one call. A book fits in one call, a file of a
    gigabyte does not. No token spans two pieces; that is all that changes.
    """
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _PIECE_BYTES) + 1 or len(data)
        yield data[start:end].decode()
        start = end


def whole_characters(tokens: Sequence[int], read: Callable[..., str]) -> Iterator[tuple[str, int]]:
    """(text, number of tokens): as few tokens as end with a character, or one where none of the next do.

    The text is what the tokens add to that of the tokens before them, because many tokenizers drop the space
    in front of a token that is decoded by itself.

    Args:
        read: the text of some tokens, each an argument.
    """
    at, before = 0, tokens[:0]

    def added(part: Sequence[int]) -> str:
        start, whole = read(*before) if before else "", read(*before, *part)
        return whole[len(start) :] if whole.startswith(start) else read(*part)

    while at < len(tokens):
        parts = (tokens[at : at + n] for n in range(1, min(MOST_PARTS, len(tokens) - at) + 1))
        part = next((part for part in parts if HALF not in added(part)), tokens[at : at + 1])
        yield added(part), len(part)
        at, before = at + len(part), part


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
