"""How the models of ACP are named, described and set beside the paper's."""

from __future__ import annotations

from ..published import published

PUBLISHED = published("analysis.acp")
ARCHITECTURES = {"pro": "FoX (Pro)", "llama": "FoX (LLaMA)"}
