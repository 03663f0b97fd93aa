"""Tokenisers of corpora: BPE trained on the text of the corpus, GPT-2's, or a file."""

import heapq
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from acp_repro.common.digests import hash_number
from acp_repro.common.files import write_text
from acp_repro.model.tokenizer import TOKENIZER_FILE, BPETokenizer, split_lines
from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.sources import Document

# A sufficient sample: on books, 32,768 ids trained on 109 MB encode other books into 0.2 % fewer tokens than
# ids trained on 64 MiB. Training on 64 MiB takes 16 s and half a gigabyte of memory.
BPE_TRAINING_BYTES = 64 << 20
_GPT2_NAME = "openai-community/gpt2"


def gpt2_json() -> str:
    """The JSON text of GPT-2's tokeniser, from the Hub or its cache on this machine."""
    from tokenizers import Tokenizer

    try:
        json_text = Tokenizer.from_pretrained(_GPT2_NAME).to_str()
    except Exception as error:  # from the network, the Hub client or the library
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"tokenizer: gpt2 is not in the Hub's cache and cannot be downloaded ({reason}); on a machine "
            f"without a network set tokenizer: {{file: PATH}} to a copy of {_GPT2_NAME}'s tokenizer.json"
        ) from error
    assert BPETokenizer(json_text).name == "gpt2", f"the tokenizer of {_GPT2_NAME} on the Hub is not GPT-2's"
    return json_text


def read_tokenizer(path: str) -> str:
    """The validated text of a ``tokenizer.json`` from the user's settings."""
    try:
        json_text = Path(path).expanduser().read_text(encoding="utf-8")
        BPETokenizer(json_text)
    except (OSError, ValueError) as error:
        raise DataError(
            f"tokenizer: file: {path} cannot be read ({error}); relative paths start at {Path.cwd()}"
        ) from error
    return json_text


def save_json(json_text: str, folder: str | Path) -> Path:
    """Writes or replaces ``tokenizer.json`` in ``folder`` and returns its path."""
    return write_text(Path(folder) / TOKENIZER_FILE, json_text)


def train_bpe(documents: Iterable[Document], vocab_size: int) -> str:
    """The JSON text of a BPE with ``vocab_size`` ids, including BOS, trained on ``documents``.

    If there is more text than `BPE_TRAINING_BYTES`, the documents with the smallest hashes are used, a fair
    sample that does not depend on their order. The result is deterministic.
    """
    sample, size = [], 0  # a heap with the largest hash first
    for document in documents:
        heapq.heappush(sample, (-hash_number(b"bpe" + document.data), document.data))
        size += len(document.data)
        while size - len(sample[0][1]) >= BPE_TRAINING_BYTES:
            size -= len(heapq.heappop(sample)[1])
    pieces = (piece for _, data in sorted(sample) for piece in split_lines(data))
    bpe = learn_bpe(pieces, vocab_size - 1)  # BPETokenizer adds BOS
    reached = bpe.get_vocab_size() + 1
    if reached != vocab_size:
        raise DataError(
            f"tokenizer: {size:,} bytes of training text yield only {reached} of "
            f"{vocab_size} ids; set {{bpe: {reached}}} or less, or add text"
        )
    return bpe.to_str()


def learn_bpe(
    pieces: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), unknown: str | None = None
) -> Any:
    """A ``tokenizers.Tokenizer``: a byte-level BPE of at most ``vocab_size`` ids, trained on ``pieces``.

    Args:
        special_tokens: tokens that get the first ids.
        unknown: the special token for text that the vocabulary cannot encode.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE(unk_token=unknown))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(pieces, trainer)
    return bpe
