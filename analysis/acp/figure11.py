"""Figure 11 (left): held-out loss at each position with and without ACP, FoX (LLaMA)."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import loss_curves, style

draw = loss_curves.draw


def make(suite: str) -> tuple[Figure, str]:
    return loss_curves.make(suite, "11 (left)", "llama", largest=None)


if __name__ == "__main__":
    style.main("figure11", __doc__, make)
