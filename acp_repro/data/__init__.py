"""Corpora, tokenisers and token sequences.

    corpus = prepare({"corpus": "stdlib", "tokenizer": "bytes"})
    train = corpus.sequences("train", context_length=1024, seed=0)
    input_ids, labels = train.batch(step=0, batch_size=8)

Only `TokenSequences` hands out tensors; nothing else here imports torch.
"""

from acp_repro.data.cache import CorruptEntry
from acp_repro.data.config import DataConfig
from acp_repro.data.corpus import Corpus, default_cache, prepare
from acp_repro.data.files import DataError
from acp_repro.data.longcrawl64 import LongCrawl64
from acp_repro.data.sequences import Sequences, TokenSequences
from acp_repro.data.tokenizer import BPETokenizer, ByteTokenizer

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "Corpus",
    "CorruptEntry",
    "DataConfig",
    "DataError",
    "LongCrawl64",
    "Sequences",
    "TokenSequences",
    "default_cache",
    "prepare",
]
