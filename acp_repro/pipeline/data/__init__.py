"""Corpora and token sequences.

    corpus = prepare({"corpus": "stdlib", "tokenizer": "bytes"})
    train = corpus.sequences("train", context_length=1024, seed=0)
    input_ids, labels = train.batch(step=0, batch_size=8)

Names load on first use. Only `TokenSequences` returns tensors, and no other module here imports torch.
"""

from acp_repro.common import lazy

_MODULES = {
    "config": ["DataConfig"],
    "corpus": ["Corpus", "prepare"],
    "files": ["DataError", "default_cache"],
    "longcrawl64": ["LongCrawl64"],
    "sequences": ["Sequences", "TokenSequences"],
    "sources": ["SampleSource", "sample_text"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy.names(__name__, _HOME)
