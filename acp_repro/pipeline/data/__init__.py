"""Corpora and token sequences.

    corpus = prepare({"corpus": "stdlib", "tokenizer": "bytes"})
    train = corpus.sequences("train", context_length=1024, seed=0)
    input_ids, labels = train.batch(step=0, batch_size=8)

Names load on first use. Only `TokenSequences` gives tensors; nothing else here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acp_repro.common import lazy

if TYPE_CHECKING:
    from acp_repro.pipeline.data.cache import default_cache
    from acp_repro.pipeline.data.config import DataConfig
    from acp_repro.pipeline.data.corpus import Corpus, prepare
    from acp_repro.pipeline.data.files import DataError
    from acp_repro.pipeline.data.longcrawl64 import LongCrawl64
    from acp_repro.pipeline.data.sequences import Sequences, TokenSequences
    from acp_repro.pipeline.data.sources import SampleSource, sample_text

_HOME = {
    "Corpus": "corpus",
    "DataConfig": "config",
    "DataError": "files",
    "LongCrawl64": "longcrawl64",
    "SampleSource": "sources",
    "Sequences": "sequences",
    "TokenSequences": "sequences",
    "default_cache": "cache",
    "prepare": "corpus",
    "sample_text": "sources",
}

__all__ = [
    "Corpus",
    "DataConfig",
    "DataError",
    "LongCrawl64",
    "SampleSource",
    "Sequences",
    "TokenSequences",
    "default_cache",
    "prepare",
    "sample_text",
]

__getattr__, __dir__ = lazy.names(__name__, _HOME)
