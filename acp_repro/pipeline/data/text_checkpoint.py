"""A checkpoint with a text: of a run the text that its suite holds out, else any file, or a book."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from acp_repro.common.errors import UsageError, usage_errors
from acp_repro.common.files import sha256_of
from acp_repro.explorer.checkpoint import Checkpoint
from acp_repro.explorer.heads import check_ids
from acp_repro.model.loss import IGNORED_LABEL
from acp_repro.model.pretrained import weight_files

from .corpus import Corpus, prepare
from .sequences import HELDOUT_COLUMN, TokenSequences
from .sources import SampleSource, open_text

BATCH_TOKENS = 8192


class TextCheckpoint(Checkpoint):
    """A checkpoint with texts as sequences of its tokens."""

    def autocast_dtype(self, device: torch.device) -> str:
        """The dtype in which the model computes: as the run was trained, else bfloat16 on a GPU."""
        usual = "bfloat16" if device.type == "cuda" else "float32"
        return self.run["settings"]["training"]["dtype"] if self.run else usual

    @property
    def weights_sha256(self) -> str:
        return "+".join(map(sha256_of, weight_files(self.folder)))

    def source(self, text: str | None = None, token_ids: str | None = None) -> str:
        """The text that :meth:`input_ids` reads, in words."""
        if token_ids or text:
            return str(token_ids or text)
        if self.run:
            return f"the run's held-out text, corpus {self.run['settings']['data']['corpus']}"
        return f"{SampleSource.title}, which comes with the project (--text FILE for another)"

    def corpus(self) -> Corpus:
        """The corpus on which the run was trained."""
        corpus = prepare(self.run["settings"]["data"])
        # Bytes always match, but merges learnt from another text give other tokens.
        if self.run["data"]["hash"] != corpus.describe()["hash"] and corpus.config.bpe_size:
            raise UsageError(
                f"{self.folder.parent} was trained on other text than {corpus.config.corpus} holds "
                "here, with another tokenizer; bring its cache entry, or give --text or --token-ids"
            )
        return corpus

    @usage_errors()
    def input_ids(
        self, context_length: int, tokens: int, *, text: str | None = None, token_ids: str | None = None
    ) -> Tensor:
        """(sequences, context_length) int64: as many whole sequences as ``tokens`` allows, at least one.

        Args:
            text: a file or folder of text. Default: the run's own held-out text, else the book that comes
                with the project, on which no FoX model of the project was trained.
            token_ids: a ``.npy`` file of integers, (tokens,) or (documents, tokens), instead of text.
        """
        tokens = max(tokens, context_length)
        if token_ids:
            ids = read_ids(token_ids, context_length, tokens)
        else:
            if text is None and self.run:
                sequences = self.corpus().sequences("heldout", context_length)
            else:
                sequences = self._sequences(text, context_length, tokens)
            ids = torch.cat([inputs for inputs, _ in sequences.iter_batches(64, tokens)])
        return check_ids(ids, self.config.vocab_size)

    def _sequences(self, text: str | None, context_length: int, tokens: int) -> TokenSequences:
        """Those of a text, as far as ``tokens`` reaches."""
        tokenizer = self.require_tokenizer()
        encoded, usable = [np.empty(0, np.int64)], 0
        for document in open_text(text).documents():
            encoded.append(tokenizer.encode(document.data).astype(np.int64))
            # Sequences come column by column: later documents are read only when these are too few.
            usable += min(len(encoded[-1]), HELDOUT_COLUMN) // context_length * context_length
            if usable >= tokens:
                break
        offsets = np.cumsum([len(ids) for ids in encoded])
        return TokenSequences(
            np.concatenate(encoded), offsets, context_length, "text", bos_id=tokenizer.bos_id
        )


def read_ids(path: str, context_length: int, tokens: int) -> Tensor:
    """(sequences, context_length) int64 of a ``.npy`` file, at most ``tokens``."""
    try:
        ids = np.atleast_2d(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError):  # numpy's own message would suggest unpickling it
        ids = np.empty(0)
    if ids.dtype.kind not in "iu":
        raise UsageError(
            f"{path}: no array of integers, (tokens,) or (documents, tokens); write one with numpy.save"
        )
    per_document = ids.shape[1] // context_length
    if not per_document:
        raise UsageError(f"{path}: a document has {ids.shape[1]} tokens; give that --context-length, or less")
    rows = ids[:, : per_document * context_length].reshape(-1, context_length)
    return torch.from_numpy(rows[: tokens // context_length].astype(np.int64))


def labelled_batches(input_ids: Tensor, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(input_ids, labels) on a device, batches of 8,192 tokens or of one sequence."""
    rows = max(1, BATCH_TOKENS // input_ids.shape[1])
    # The token after a sequence's last one is not in input_ids, so that position has no loss.
    labels = input_ids.roll(-1, 1)
    labels[:, -1] = IGNORED_LABEL
    ids, labels = (x.to(device).split(rows) for x in (input_ids, labels))
    return list(zip(ids, labels, strict=True))
