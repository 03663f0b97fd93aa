"""Any FoX checkpoint folder with any text, for commands that read models from elsewhere.

A checkpoint is a folder in the authors' format (``config.json``, ``model.safetensors``) or a run folder
``runs/SUITE/RUN``. A run folder has its weights in ``model/``, and its ``run.json`` names text and tokeniser.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acp_repro.common.errors import UsageError, usage_errors
from acp_repro.common.files import sha256_of
from acp_repro.model import FoXConfig, FoXForCausalLM, load_config, load_pretrained
from acp_repro.model.pretrained import CONFIG_FILE, weight_files
from acp_repro.pipeline.data import BPETokenizer, ByteTokenizer, Corpus, DataError, TokenSequences, prepare
from acp_repro.pipeline.data.sequences import HELDOUT_COLUMN
from acp_repro.pipeline.data.sources import Document, SampleSource, TextSource

RUN_FILE, TOKENIZER_FILE = "run.json", "tokenizer.json"
# Names, in other projects' tokenisers, of the token in front of a document; GPT-2's comes first.
_BOS_NAMES = ("<|endoftext|>", "<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
# One token of a model with fewer weights is too little work to share: threads would only wait for each other.
# On two busy cores a model with 4.5 million weights made 47 tokens/s with one thread, and 4 with two.
_FEWEST_WEIGHTS_FOR_THREADS = 20_000_000

_LEAST_TO_PRUNE = 256  # two of the largest blocks: no error proposes a length at which nothing can be pruned


class CheckpointNotUsable(UsageError):
    """The folder or its text cannot be used; one line that says what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder and config, and the settings of our own run if it is one."""

    folder: Path
    config: FoXConfig
    run: dict[str, Any] | None

    @classmethod
    def find(cls, path: str | Path) -> Checkpoint:
        """The checkpoint at a folder in the authors' format, a run folder, or its ``model/``.

        Raises:
            CheckpointNotUsable: there is none, or it is not of a Forgetting Transformer.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointNotUsable(
                f"{path}: no such folder; give one with {CONFIG_FILE} and model.safetensors, or a "
                "run folder such as runs/cpu/NAME"
            )
        run, folder = _run(path), path / "model"
        if run is None:
            folder = path
            # Only a folder of this name can be a run's weights; elsewhere run.json belongs to another
            # program.
            run = _run(path.resolve().parent) if path.resolve().name == "model" else None
        if not (folder / CONFIG_FILE).is_file():
            raise CheckpointNotUsable(_no_config(path, folder, run))
        try:
            return cls(folder, load_config(folder), run)
        except ValueError as error:
            raise CheckpointNotUsable(
                f"{error}; this command reads FoX checkpoints in the authors' format"
            ) from error

    @property
    def name(self) -> str:
        """The name of the run, or of the folder."""
        folder = self.folder.resolve()
        return folder.parent.name if folder.name == "model" else folder.name

    @property
    def context_length(self) -> int | None:
        """Tokens of the run's training sequences; None if not known, because the authors' format does not
        have it."""
        return None if self.run is None else self.run["settings"]["context_length"]

    @property
    def dtype(self) -> str | None:
        """``float32`` or ``bfloat16``, as the run was trained; None if not known."""
        return None if self.run is None else self.run["settings"]["training"]["dtype"]

    def autocast_dtype(self, device: torch.device) -> str:
        """The dtype in which the model computes: as the run was trained, else bfloat16 on a GPU."""
        return self.dtype or ("bfloat16" if device.type == "cuda" else "float32")

    @property
    def weights_sha256(self) -> str:
        return "+".join(map(sha256_of, weight_files(self.folder)))

    @usage_errors()
    def load(self, device: torch.device, **options: Any) -> FoXForCausalLM:
        """The model; ``options`` are those of :func:`acp_repro.model.load_pretrained`.

        Raises:
            UsageError: the weights are missing or damaged.
        """
        return load_pretrained(self.folder, device=device, **options)

    def source(self, text: str | Path | None = None, token_ids: str | Path | None = None) -> str:
        """The text that :meth:`input_ids` reads, in words."""
        if token_ids or text:
            return str(token_ids or text)
        if self.run is not None:
            return f"the run's held-out text, corpus {self.run['settings']['data']['corpus']}"
        return f"{SampleSource.title}, which comes with the project (--text FILE for another)"

    @property
    def tokenizer(self) -> BPETokenizer | ByteTokenizer | None:
        """The tokeniser of the model: the run's, or a ``tokenizer.json`` of ours beside the weights; else
        None."""
        if self.run is not None:
            return self.corpus().tokenizer
        path = self.folder / TOKENIZER_FILE
        if path.is_file():
            _read_json(path)
            try:
                return BPETokenizer(path.read_text(encoding="utf-8"))
            except (DataError, ValueError) as error:
                if isinstance(error.__cause__, ImportError):
                    raise  # the library is not installed, so the file cannot be judged
                return None  # of another project
        return ByteTokenizer() if self.config.vocab_size == ByteTokenizer.vocab_size else None

    def check_reads_like(self, other: Checkpoint) -> None:
        """Checks that another model reads a text as the same tokens.

        Raises:
            CheckpointNotUsable: it does not.
        """
        first, second = (
            (c.config.vocab_size, getattr(c.tokenizer, "json_text", None)) for c in (self, other)
        )
        if first != second:
            raise CheckpointNotUsable(
                f"{self.name} and {other.name} have different tokenizers; compare models that read the "
                "same tokens"
            )

    def own_tokenizer(self, fix: str = "put the model's there") -> BPETokenizer | ByteTokenizer:
        """:attr:`tokenizer`, which must exist.

        Raises:
            CheckpointNotUsable: it does not; the message ends with ``fix``.
        """
        if (tokenizer := self.tokenizer) is None:
            raise CheckpointNotUsable(f"{self.folder} has no tokenizer.json of this project's form; {fix}")
        return tokenizer

    @usage_errors()
    def input_ids(
        self,
        context_length: int,
        tokens: int,
        *,
        text: str | Path | None = None,
        token_ids: str | Path | None = None,
    ) -> Tensor:
        """(sequences, context_length) int64: as many whole sequences as ``tokens`` allows, at least one.

        Args:
            text: a file or folder of text. Default: the run's own held-out text, else the book that comes
                with the project, on which no FoX model of the project was trained.
            token_ids: a ``.npy`` file of integers, (tokens,) or (documents, tokens), instead of text.

        Raises:
            UsageError: the text is too short or cannot become the model's tokens.
        """
        tokens = max(tokens, context_length)
        if token_ids is not None:
            return self._from_file(Path(token_ids), context_length, tokens)
        corpus = None
        if text is None and self.run is not None:
            corpus = self.corpus()
            offsets = corpus.offsets("heldout")
        else:
            ids, offsets, bos_id = self._encode(text, context_length, tokens)
        longest = int(np.diff(offsets).max(initial=0))
        if longest < context_length:
            raise CheckpointNotUsable(_too_short(text or "the text", longest, context_length))
        if corpus is not None:
            sequences = corpus.sequences("heldout", context_length)
        else:
            sequences = TokenSequences(ids, offsets, context_length, "text", bos_id=bos_id)
        inputs = torch.cat([inputs for inputs, _ in sequences.iter_batches(64, tokens)])
        if int(inputs.max()) >= self.config.vocab_size:
            raise CheckpointNotUsable(self._too_large(int(inputs.max()), "the text's tokenizer"))
        return inputs

    def corpus(self) -> Corpus:
        """The corpus on which the run was trained.

        Raises:
            CheckpointNotUsable: its text differs now, and so would its tokeniser.
        """
        corpus = prepare(self.run["settings"]["data"])
        # Bytes always match, but merges learnt from another text give other tokens.
        if self.run["data"]["hash"] != corpus.describe()["hash"] and corpus.config.bpe_size:
            raise CheckpointNotUsable(
                f"{self.folder.parent} was trained on other text than {corpus.config.corpus} holds "
                "here, with another tokenizer; bring its cache entry, or give --token-ids FILE.npy"
            )
        return corpus

    def _encode(
        self, text: str | Path | None, context_length: int, tokens: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Ids, offsets and BOS of the documents of ``text``, as far as ``tokens`` reaches."""
        documents: Iterable[Document] = (
            SampleSource().documents() if text is None else TextSource([text], key="--text").documents()
        )
        encode, bos_id = self._encoder()
        encoded, usable = [], 0
        for document in documents:
            encoded.append(encode(document.data).astype(np.int64))
            # Sequences come column by column: later documents are read only when these are too few.
            usable += min(len(encoded[-1]), HELDOUT_COLUMN) // context_length * context_length
            if usable >= tokens:
                break
        offsets = np.cumsum([0, *map(len, encoded)])
        return np.concatenate([*encoded, np.empty(0, np.int64)]), offsets, bos_id

    def _encoder(self) -> tuple[Callable[[bytes], np.ndarray], int]:
        """The function that encodes text for this model, and the id in front of each sequence."""
        path = self.folder / TOKENIZER_FILE
        if self.run is None and path.is_file():
            return _read_tokenizer(path, self.config.vocab_size)
        if (own := self.tokenizer) is not None:
            return own.encode, own.bos_id
        raise CheckpointNotUsable(
            f"{self.folder} has {self.config.vocab_size} token ids and no {TOKENIZER_FILE}; put the "
            "model's there, or give tokens: --token-ids FILE.npy"
        )

    def _from_file(self, path: Path, context_length: int, tokens: int) -> Tensor:
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise CheckpointNotUsable(f"{path} does not exist; write it with numpy.save") from None
        except (OSError, ValueError, EOFError):  # numpy's own message would suggest unpickling it
            ids = None
        if not isinstance(ids, np.ndarray):
            raise CheckpointNotUsable(f"{path}: not an array of numpy; write one with numpy.save")
        if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
            raise CheckpointNotUsable(
                f"{path}: holds {ids.dtype} {ids.shape}; it must hold integers, (tokens,) or "
                "(documents, tokens)"
            )
        ids = np.atleast_2d(ids)
        per_document = ids.shape[1] // context_length
        if not per_document or not len(ids):
            raise CheckpointNotUsable(_too_short(path, ids.shape[1], context_length))
        whole = ids[:, : per_document * context_length].reshape(-1, context_length)
        whole = np.ascontiguousarray(whole[: tokens // context_length]).astype(np.int64)
        if whole.min() < 0 or whole.max() >= self.config.vocab_size:
            wrong = whole.max() if whole.max() >= self.config.vocab_size else whole.min()
            raise CheckpointNotUsable(self._too_large(int(wrong), str(path)))
        return torch.from_numpy(whole)

    def _too_large(self, token: int, source: str) -> str:
        return (
            f"{source} gives token id {token}, but {self.folder} has ids 0 to "
            f"{self.config.vocab_size - 1}; take the tokenizer that the model was trained with"
        )


def one_thread_if_small(model: FoXForCausalLM) -> None:
    """Uses one thread for a small model; for commands that go token by token."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and model.config.num_parameters() < _FEWEST_WEIGHTS_FOR_THREADS:
        torch.set_num_threads(1)


def _read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        CheckpointNotUsable: the file is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointNotUsable(f"{path}: damaged ({error}); copy it again") from None


def _run(folder: Path) -> dict[str, Any] | None:
    """The content of a run's ``run.json``; None if there is none, or it is another program's."""
    path = folder / RUN_FILE
    run = _read_json(path) if path.is_file() else None
    return run if isinstance(run, dict) and {"command", "data", "settings"} <= run.keys() else None


def _read_tokenizer(path: Path, vocab_size: int) -> tuple[Callable[[bytes], np.ndarray], int]:
    text = path.read_text(encoding="utf-8")
    try:
        ours = BPETokenizer(text)  # its BOS is not in the file: it is the model's last id
        if ours.vocab_size == vocab_size:
            return ours.encode, ours.bos_id
        import tokenizers

        theirs = tokenizers.Tokenizer.from_str(text)
    except DataError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointNotUsable(
            f"{path}: not a file of the library `tokenizers` ({error}); copy it again"
        ) from error
    bos_id = next((i for i in map(theirs.token_to_id, _BOS_NAMES) if i is not None), None)
    if bos_id is None:
        raise CheckpointNotUsable(
            f"{path}: has none of {', '.join(_BOS_NAMES)} to put in front of a sequence; "
            "give tokens: --token-ids FILE.npy"
        )

    def encode(data: bytes) -> np.ndarray:
        encoding = theirs.encode_batch_fast([data.decode()], add_special_tokens=False)[0]
        return np.array(encoding.ids, dtype=np.int64)

    return encode, bos_id


def _no_config(path: Path, folder: Path, run: dict[str, Any] | None) -> str:
    if run is not None:
        return f"{folder} holds no weights yet; train them with `{run['command']}`"
    runs = sorted(p.parent.name for p in path.glob(f"*/{RUN_FILE}"))
    if runs:
        return f"{path} is a folder of runs; give one of them, e.g. {path / runs[0]}"
    return (
        f"{path} holds no {CONFIG_FILE}; give a folder with {CONFIG_FILE} and model.safetensors, "
        "or a run folder such as runs/cpu/NAME"
    )


def _too_short(source: object, longest: int, context_length: int) -> str:
    if not longest:
        return f"{source}: holds no text; give a longer one"
    fix = f"pass --length {longest} or less, or " if longest >= _LEAST_TO_PRUNE else ""
    return (
        f"{source}: the longest document has {longest} tokens, fewer than the length {context_length}; "
        f"{fix}give a longer text"
    )
