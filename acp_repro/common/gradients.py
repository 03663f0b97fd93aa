"""``torch.no_grad()`` for modules that must not import torch, because the registry reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under ``torch.no_grad()``; torch is imported at the first call."""

    @functools.wraps(function)
    def quiet(*arguments: Any, **keywords: Any) -> Any:
        import torch

        with torch.no_grad():
            return function(*arguments, **keywords)

    return quiet
