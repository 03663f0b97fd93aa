"""The peak speed of GPUs: with ``FoXConfig.flops_per_token``, what a plan and MFU rest on.

Imports no torch.
"""

from __future__ import annotations

import re

# Dense tensor-core FLOP/s with 16-bit inputs and float32 sums, without sparsity. The name is what
# torch.cuda.get_device_name gives, or a short form of it. The first pattern that matches counts.
_PEAK_FLOPS_16_BIT: tuple[tuple[str, float], ...] = (
    (r"\bA100\b", 312e12),  # NVIDIA A100 datasheet, PCIe and SXM alike
    (r"\bH100 PCIe\b", 756e12),  # NVIDIA H100 datasheet (2022), 1,513 with sparsity
    (r"\bH100 NVL\b", 835e12),  # NVIDIA H100 datasheet, 1,671 with sparsity
    (r"\bH100\b", 989e12),  # NVIDIA H100 datasheet, SXM, 1,979 with sparsity
    (r"\bH200 NVL\b", 835e12),  # NVIDIA H200 datasheet, 1,671 with sparsity
    (r"\bH200\b", 989e12),  # NVIDIA H200 datasheet, SXM, 1,979 with sparsity
    (r"\bL40S\b", 362e12),  # NVIDIA L40S datasheet, 733 with sparsity
    (r"\bB200\b", 2250e12),  # NVIDIA DGX B200 datasheet: 36 PFLOP/s with sparsity, 8 GPUs
    # NVIDIA Ada GPU architecture whitepaper, Table 2. The laptop and D models are other chips.
    (r"\b(RTX )?4090\b(?! (Laptop|D\b))", 165e12),
)


def peak_flops(device_name: str, dtype: object = "bfloat16") -> float | None:
    """Dense FLOP/s that the maker states for a GPU; None for a GPU that this table does not have.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it, or short: ``h100``, ``a100``.
        dtype: ``bfloat16`` or ``float16``, as text or as torch's; None is returned for others.
    """
    if str(dtype).removeprefix("torch.") not in ("bfloat16", "float16"):
        return None
    rows = (flops for name, flops in _PEAK_FLOPS_16_BIT if re.search(name, device_name, re.IGNORECASE))
    return next(rows, None)
