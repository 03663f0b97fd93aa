"""What is drawn and claimed."""

from acp_repro.pipeline.paper import Claim, Item

from . import figure1

CLAIM = Claim("Toys learn", "Section 1: they do", "the error is under 0.1", ("error",), figure1.learns)
ITEMS = (Item("figure1", figure1.make, "Error against width", ("error",), claims=(CLAIM,)),)
