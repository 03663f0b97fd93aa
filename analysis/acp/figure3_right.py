"""Figure 3 (right): needle in a haystack with and without ACP, FoX (Pro), longest context."""

from __future__ import annotations

from matplotlib.figure import Figure

from .. import drawing
from . import needles

draw = needles.draw


def make(found: drawing.Found) -> tuple[Figure, str]:
    return needles.make(found, "3 (right)")


if __name__ == "__main__":
    drawing.main(globals())
