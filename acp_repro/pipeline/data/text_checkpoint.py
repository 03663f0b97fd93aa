"""A checkpoint with text: the held-out text of a run, any file, or the sample book."""

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
    """A checkpoint that reads text as sequences of its tokens."""

    def autocast_dtype(self, device: torch.device) -> str:
        """The compute dtype: that of the run's training, else bfloat16 on a GPU and float32 on a CPU."""
        usual = "bfloat16" if device.type == "cuda" else "float32"
        return self.run["settings"]["training"]["dtype"] if self.run else usual

    @property
    def weights_sha256(self) -> str:
        return "+".join(map(sha256_of, weight_files(self.folder)))

    def source(self, text: str | None = None, token_ids: str | None = None) -> str:
        """A description of the text that :meth:`input_ids` reads."""
        if token_ids or text:
            return str(token_ids or text)
        if self.run:
            return f"the run's held-out text, corpus {self.run['settings']['data']['corpus']}"
        return f"{SampleSource.title}, which comes with the project (--text FILE for another)"

    def corpus(self) -> Corpus:
        """The corpus on which the run was trained."""
        corpus = prepare(self.run["settings"]["data"])
        # Byte tokens always match, but BPE merges trained on other text produce other tokens.
        if self.run["data"]["hash"] != corpus.describe()["hash"] and corpus.config.bpe_size:
            raise UsageError(
                f"{self.folder.parent} was trained on other text than corpus {corpus.config.corpus} contains "
                "here, with another tokenizer; copy its cache entry, or use --text or --token-ids"
            )
        return corpus

    @usage_errors()
    def input_ids(
        self, context_length: int, tokens: int, *, text: str | None = None, token_ids: str | None = None
    ) -> Tensor:
        """(sequences, context_length) int64: as many complete sequences as ``tokens`` allows, at least one.

        Args:
            text: a file or folder of text. Default: the run's held-out text, else the book included in the
                project, on which no FoX model of the project was trained.
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
        """The sequences of a text, with at least ``tokens`` tokens if the text is long enough."""
        tokenizer = self.require_tokenizer()
        encoded, usable = [np.empty(0, np.int64)], 0
        for document in open_text(text).documents():
            encoded.append(tokenizer.encode(document.data).astype(np.int64))
            # The order is column by column, so further documents are needed only if these are too few.
            usable += min(len(encoded[-1]), HELDOUT_COLUMN) // context_length * context_length
            if usable >= tokens:
                break
        offsets = np.cumsum([len(ids) for ids in encoded])
        return TokenSequences(
            np.concatenate(encoded), offsets, context_length, "text", bos_id=tokenizer.bos_id
        )


def read_ids(path: str, context_length: int, tokens: int) -> Tensor:
    """The sequences (sequences, context_length) int64 of a ``.npy`` file, at most ``tokens`` tokens."""
    try:
        ids = np.atleast_2d(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError):  # numpy's own message suggests unpickling
        ids = np.empty(0)
    if ids.dtype.kind not in "iu":
        raise UsageError(
            f"{path}: not an array of integers, (tokens,) or (documents, tokens); write one with numpy.save"
        )
    per_document = ids.shape[1] // context_length
    if not per_document:
        raise UsageError(
            f"{path}: a document has {ids.shape[1]} tokens; reduce --context-length to at most this"
        )
    rows = ids[:, : per_document * context_length].reshape(-1, context_length)
    return torch.from_numpy(rows[: tokens // context_length].astype(np.int64))


def labelled_batches(input_ids: Tensor, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Batches (input_ids, labels) on ``device``, of 8,192 tokens or of one longer sequence."""
    rows = max(1, BATCH_TOKENS // input_ids.shape[1])
    # The token after the last position of a sequence is not in input_ids, so this position has no loss.
    labels = input_ids.roll(-1, 1)
    labels[:, -1] = IGNORED_LABEL
    ids, labels = (x.to(device).split(rows) for x in (input_ids, labels))
    return list(zip(ids, labels, strict=True))
