"""The cost of a suite of Forgetting Transformers, by formula and from measured speeds. Needs no torch."""

from .cost import Assumptions, Cost, cost_of
from .speed import Speeds

__all__ = ["Assumptions", "Cost", "Speeds", "cost_of"]
