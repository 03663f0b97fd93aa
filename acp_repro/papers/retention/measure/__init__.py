"""The measuring functions of all metrics, each with the columns of its records.

A module is imported, and torch with it, when a metric is measured.
"""

from acp_repro.common import lazy

__getattr__, __dir__ = lazy.modules(__name__, __path__)
