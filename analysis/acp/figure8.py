"""Figure 8: held-out loss at each position with and without ACP, FoX (Pro), the other sizes."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import loss_curves, style

draw = loss_curves.draw


def make(suite: str) -> tuple[Figure, str]:
    return loss_curves.make(suite, "8", "pro", largest=False)


if __name__ == "__main__":
    style.main("figure8", __doc__, make)
