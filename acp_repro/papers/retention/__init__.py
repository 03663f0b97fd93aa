"""Adaptive Retention: its suites, its training tasks, and its metrics."""

from acp_repro.common import lazy

__getattr__, __dir__ = lazy.modules(__name__, __path__)
