"""Adaptive Retention: its suites, its training tasks, and its metrics."""

import pkgutil

from acp_repro.common import lazy

__getattr__, __dir__ = lazy.names(__name__, {module.name: "" for module in pkgutil.iter_modules(__path__)})
