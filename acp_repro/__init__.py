"""A reproduction of "Adaptive Computation Pruning for the Forgetting Transformer", and a library.

The package exports the most used names of the library: ``from acp_repro import forgetting_attention``. Each
name loads on first use. Importing the package does not load torch or triton, so `analysis` works without
them.
"""

import sys
from typing import TYPE_CHECKING

from .common import lazy

if sys.version_info < (3, 11):  # noqa: UP036  # a clone may be used without installation
    sys.exit(
        f"error: acp_repro needs Python 3.11 or newer, and {sys.executable} is "
        f"Python {sys.version.split()[0]}; run .venv/bin/python, which "
        "`make setup PYTHON=/path/to/python3.11` creates"
    )

if TYPE_CHECKING:
    from .attention import (
        PagedKVCache,
        forgetting_attention,
        forgetting_attention_with_kvcache,
        gather_sequence,
        pruned_ratio,
        shard_sequence,
    )
    from .model import (
        BPETokenizer,
        ByteTokenizer,
        ForgettingAttentionLayer,
        FoXConfig,
        FoXForCausalLM,
        load_pretrained,
    )

__version__ = "0.1.0"

_HOME = {
    "BPETokenizer": "model",
    "ByteTokenizer": "model",
    "FoXConfig": "model",
    "FoXForCausalLM": "model",
    "ForgettingAttentionLayer": "model",
    "PagedKVCache": "attention",
    "forgetting_attention": "attention",
    "forgetting_attention_with_kvcache": "attention",
    "gather_sequence": "attention",
    "load_pretrained": "model",
    "pruned_ratio": "attention",
    "shard_sequence": "attention",
}

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "FoXConfig",
    "FoXForCausalLM",
    "ForgettingAttentionLayer",
    "PagedKVCache",
    "__version__",
    "forgetting_attention",
    "forgetting_attention_with_kvcache",
    "gather_sequence",
    "load_pretrained",
    "pruned_ratio",
    "shard_sequence",
]

__getattr__, __dir__ = lazy.names(__name__, _HOME)
