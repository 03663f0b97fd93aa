"""Text to token ids: bytes, byte-pair encoding trained on the corpus itself, or GPT-2's.

All decode to exactly the same text, need no unknown token, and have a BOS that no text encodes to. Token
files hold text only. Every training sequence begins with BOS, so a model must always read it first:
``prompt`` puts it there.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from acp_repro.common.files import write_text
from acp_repro.pipeline.data.config import BYTES_VOCAB_SIZE, GPT2_VOCAB_SIZE
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sources import Document

TOKENIZER_FILE = "tokenizer.json"
# Enough, and bounded: on books, 32,768 ids learnt from 109 MB encode other books into 0.2 % fewer tokens than
# those learnt from 64 MiB. 64 MiB take 16 s and half a gigabyte of memory.
BPE_TRAINING_BYTES = 64 << 20
GPT2_BOS = "<|endoftext|>"
_GPT2_NAME = "openai-community/gpt2"
_PIECE_BYTES = 1 << 20


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is BOS."""

    name = "bytes"
    vocab_size = BYTES_VOCAB_SIZE
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
    """Byte-level BPE as in GPT-2, kept as the JSON text of the `tokenizers` library.

    BOS is ``<|endoftext|>`` if the vocabulary has it (GPT-2's last id, 50256). One made by `train_bpe` has
    not. There BOS is one more id after the library's last, and ``vocab_size`` counts it.

    Raises:
        DataError: ``json_text`` is not a tokeniser of that library; ``where`` names its file.
    """

    def __init__(self, json_text: str, where: str = "tokenizer.json"):
        try:
            self._bpe = _library().Tokenizer.from_str(json_text)
        except DataError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                f"{where}: not a file of the library `tokenizers` ({error}); copy it again"
            ) from error
        self.json_text = json_text
        # "<|endoftext|>" in a text is thirteen characters of that text, and never BOS.
        self._bpe.encode_special_tokens = True
        # Encoding changes no text: nothing is truncated, padded, or put around it.
        self._bpe.no_padding()
        self._bpe.no_truncation()
        size, given = self._bpe.get_vocab_size(), self._bpe.token_to_id(GPT2_BOS)
        self.bos_id = size if given is None else given
        self.vocab_size = size + (given is None)
        self.name = "gpt2" if self._is_gpt2() else f"bpe{self.vocab_size}"

    def _is_gpt2(self) -> bool:
        ids = [self._bpe.token_to_id(token) for token in ("Hello", "Ġworld", GPT2_BOS)]
        return (self.vocab_size, *ids) == (GPT2_VOCAB_SIZE, 15496, 995, 50256)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of ``text``: shape (tokens,), dtype uint32; BOS is never among them."""
        ids = [
            # encode_batch_fast skips the character offsets, which are half of the work
            np.array(self._ids(piece.decode()), dtype=np.uint32)
            for piece in _pieces(_as_bytes(text))
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

    def _ids(self, text: str) -> list[int]:
        return self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids


Tokenizer = ByteTokenizer | BPETokenizer


def gpt2_json() -> str:
    """The JSON text of GPT-2's tokeniser, from the Hub or from the Hub's cache on this machine.

    Raises:
        DataError: there is neither, or the file is not GPT-2's; the message says what to do offline.
    """
    try:
        json_text = _library().Tokenizer.from_pretrained(_GPT2_NAME).to_str()
    except DataError:
        raise
    except Exception as error:  # of the network, of the Hub's client, of the library
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"tokenizer: gpt2 is not in the Hub's cache and cannot be fetched ({reason}); on a machine "
            f"without network set tokenizer: {{file: PATH}} to a copy of {_GPT2_NAME}'s tokenizer.json"
        ) from error
    if BPETokenizer(json_text).name != "gpt2":
        raise DataError(
            f"tokenizer: what the Hub gave for {_GPT2_NAME} is not GPT-2's; empty the Hub's cache "
            "(HF_HOME) and fetch it again"
        )
    return json_text


def read_json(path: str) -> str:
    """The text of a ``tokenizer.json``.

    Raises:
        DataError: the file cannot be read, or is not JSON.
    """
    try:
        json_text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"tokenizer: file: {path} cannot be read ({error}); relative paths start at {Path.cwd()}; "
            "`python -m acp_repro.data export-tokenizer` writes such a file"
        ) from error
    BPETokenizer(json_text, where=f"tokenizer: file: {path}")
    return json_text


def save_json(json_text: str, folder: str | Path) -> Path:
    """Writes ``tokenizer.json`` into ``folder``, over an older one, and gives its path."""
    return write_text(Path(folder) / TOKENIZER_FILE, json_text)


def train_bpe(documents: Iterable[Document], vocab_size: int) -> str:
    """The JSON text of a BPE with ``vocab_size`` ids, BOS included, trained on ``documents``.

    If there is more text than `BPE_TRAINING_BYTES`, the documents with the smallest hashes are used. They are
    a fair sample that does not depend on their order. The same documents give the same bytes.

    Raises:
        DataError: the text holds too few distinct pairs for that many ids.
    """
    library = _library()
    sample, size = [], 0  # a heap with the largest hash first
    for document in documents:
        heapq.heappush(sample, (-_small_hash(document.data), document.data))
        size += len(document.data)
        while size - len(sample[0][1]) >= BPE_TRAINING_BYTES:
            size -= len(heapq.heappop(sample)[1])
    bpe = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # BOS is ours
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    pieces = (piece.decode() for _, data in sorted(sample) for piece in _pieces(data))
    bpe.train_from_iterator(pieces, trainer)
    reached = bpe.get_vocab_size() + 1
    if reached != vocab_size:
        raise DataError(
            f"tokenizer: {size:,} bytes of training text give {reached} ids of the "
            f"{vocab_size} asked for; write {{bpe: {reached}}} or less, or add text"
        )
    return bpe.to_str()


def _small_hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"bpe" + data).digest()[:8], "big")


def _pieces(data: bytes) -> Iterator[bytes]:
    """``data`` in pieces of about a megabyte that end with a line.

    The library keeps some hundred bytes for each token of one call. A book fits in one call, a file of a
    gigabyte does not. No token spans two pieces; that is all that changes.
    """
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _PIECE_BYTES) + 1 or len(data)
        yield data[start:end]
        start = end


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _library():
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise DataError(
            "tokenizer: byte-pair encoding needs the library `tokenizers`; "
            "pip install -e '.[bpe]', or set tokenizer: bytes"
        ) from error
    return tokenizers
