"""What a suite of Forgetting Transformers costs, by formula and by what was measured. Needs no torch."""

from .cost import Assumptions, Cost, cost_of
from .speed import Speeds

__all__ = ["Assumptions", "Cost", "Speeds", "cost_of"]
