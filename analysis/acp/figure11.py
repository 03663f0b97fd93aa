"""Figure 11 (left): held-out loss at each position with and without ACP, FoX (LLaMA)."""

from __future__ import annotations

from matplotlib.figure import Figure

from .. import drawing
from . import loss_curves

draw = loss_curves.draw


def make(found: drawing.Found) -> tuple[Figure, str]:
    return loss_curves.make(found, "11 (left)", "llama")


if __name__ == "__main__":
    drawing.main(globals())
