"""FoX, the Forgetting Transformer language model (Pro and LLaMA), with ACP in its attention.

Names load on first use, so ``from acp_repro.model import FoXConfig`` does not import torch.
"""

from typing import TYPE_CHECKING

from acp_repro.common import lazy

if TYPE_CHECKING:
    from .cache import FoXCache
    from .config import FoXConfig
    from .fox import FoXForCausalLM, FoXModel, load_pretrained
    from .generation import filter_logits, generate, stream_tokens
    from .layers import ForgettingAttentionCore, ForgettingAttentionLayer
    from .loss import linear_cross_entropy
    from .pretrained import load_config, save_pretrained
    from .tokenizer import BPETokenizer, ByteTokenizer

_HOME = {
    "BPETokenizer": "tokenizer",
    "ByteTokenizer": "tokenizer",
    "FoXCache": "cache",
    "FoXConfig": "config",
    "FoXForCausalLM": "fox",
    "FoXModel": "fox",
    "ForgettingAttentionCore": "layers",
    "ForgettingAttentionLayer": "layers",
    "filter_logits": "generation",
    "generate": "generation",
    "linear_cross_entropy": "loss",
    "load_config": "pretrained",
    "load_pretrained": "fox",
    "save_pretrained": "pretrained",
    "stream_tokens": "generation",
}

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "FoXCache",
    "FoXConfig",
    "FoXForCausalLM",
    "FoXModel",
    "ForgettingAttentionCore",
    "ForgettingAttentionLayer",
    "filter_logits",
    "generate",
    "linear_cross_entropy",
    "load_config",
    "load_pretrained",
    "save_pretrained",
    "stream_tokens",
]

__getattr__, __dir__ = lazy.names(__name__, _HOME)
