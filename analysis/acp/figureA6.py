"""Figure A6: needle in a haystack after training on text that holds needles."""

from __future__ import annotations

from matplotlib.figure import Figure

from .. import drawing
from . import needles

draw = needles.draw


def make(found: drawing.Found) -> tuple[Figure, str]:
    return needles.make(found, "A6")


if __name__ == "__main__":
    drawing.main(globals())
