"""The measuring functions of all metrics, each with the columns of its records.

A module is imported, and torch with it, when a metric is measured.
"""

import pkgutil

from acp_repro.common import lazy

__getattr__, __dir__ = lazy.names(__name__, {module.name: "" for module in pkgutil.iter_modules(__path__)})
