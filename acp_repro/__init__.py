"""Adaptive Computation Pruning for the Forgetting Transformer, re-run end to end.

Importing the package loads neither torch nor triton: ``analysis`` reads records through
:mod:`acp_repro.records` on machines that have neither.
"""

__version__ = "0.1.0"
