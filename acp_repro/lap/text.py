"""Text to token ids and back, with a ``tokenizer.json`` of the library `tokenizers`."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import tokenizers

from acp_repro.common import files
from acp_repro.model.tokenizer import whole_characters

from .config import PruningError

TOKENIZER_FILE = "tokenizer.json"
PAD, EOS = "<pad>", "</s>"  # T5's names


class TextTokenizer:
    """A tokeniser with T5's two special tokens.

    Args:
        json_text: the content of a ``tokenizer.json``, with the tokens ``<pad>`` and ``</s>``.
        where: its file, for errors.

    Raises:
        PruningError: the content is not a tokeniser, or lacks one of the tokens.
    """

    def __init__(self, json_text: str, where: str = TOKENIZER_FILE):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json_text)
        except Exception as error:  # the library raises no narrower class
            raise PruningError(f"{where}: not a file of the library `tokenizers` ({error})") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # "</s>" within a text is encoded as four ordinary characters.
        self._tokenizer.encode_special_tokens = True
        ids = [self._tokenizer.token_to_id(token) for token in (PAD, EOS)]
        if None in ids:
            raise PruningError(f"{where}: has no {PAD} or no {EOS}, which every T5 tokenizer has")
        self.pad_id, self.eos_id = ids
        self.json_text = json_text
        self.vocab_size = self._tokenizer.get_vocab_size()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the tokeniser in a ``tokenizer.json``.

        Raises:
            PruningError: the file cannot be read, is not a tokeniser, or lacks one of the tokens.
        """
        try:
            return cls(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise PruningError(f"{path}: cannot be read ({error})") from error

    @classmethod
    def with_special_tokens(cls, json_text: str) -> Self:
        """Adds ``<pad>`` and ``</s>``, as the last two ids, to a tokeniser that has neither."""
        tokenizer = tokenizers.Tokenizer.from_str(json_text)
        tokenizer.add_special_tokens([PAD, EOS])
        return cls(tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        """Ids without EOS."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text without EOS.

        Raises:
            PruningError: a text contains a lone surrogate.
        """
        for number, text in enumerate(texts, 1):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise PruningError(
                    f"text {number} of {len(texts)} has a lone surrogate at character {error.start + 1}; "
                    "decode it as UTF-8"
                ) from None
        return [text.ids for text in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        return self._tokenizer.decode([i for i in ids if i not in (self.pad_id, self.eos_id)])

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as a readable string, with a leading space if the token begins with one."""
        return [self._show_tokens(i) for i in ids]

    def characters(self, ids: Sequence[int]) -> Iterator[tuple[str, int]]:
        """(string, number of tokens): as :meth:`tokens`, with tokens that share a character merged."""
        return whole_characters(ids, self._show_tokens)

    def _show_tokens(self, token_id: int, *more: int) -> str:
        if more:
            return self._tokenizer.decode([token_id, *more])
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return f"<{token_id}>"
        if token.startswith("▁"):
            return " " + token[1:]
        if token in (PAD, EOS):
            return token
        return self._tokenizer.decode([token_id]) or token

    def save(self, folder: Path) -> None:
        files.write_text(folder / TOKENIZER_FILE, self.json_text)
