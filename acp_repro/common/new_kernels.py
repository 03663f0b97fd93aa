"""The switch for kernels that no GPU has run yet.

They pass their tests in Triton's interpreter and its compiler takes them; that is not enough to be what a
user gets. Until the GPU tests have passed, a GPU keeps to the paths beside them. `make test-gpu` turns the
switch on, and the module goes when there is nothing left for it.
"""

from __future__ import annotations

import os

VARIABLE = "ACP_REPRO_NEW_KERNELS"


def new_kernels() -> bool:
    """Whether ``ACP_REPRO_NEW_KERNELS=1`` stands in the environment."""
    return os.environ.get(VARIABLE) == "1"
