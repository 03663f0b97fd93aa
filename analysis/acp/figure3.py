"""Figure 3 (left): held-out loss at each position with and without ACP, FoX (Pro), largest size."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import loss_curves, style

draw = loss_curves.draw


def make(suite: str) -> tuple[Figure, str]:
    return loss_curves.make(suite, "3 (left)", "pro", largest=True)


if __name__ == "__main__":
    style.main("figure3", __doc__, make)
