"""How a trained run gives the records of each metric; the columns are in ``metrics``. None draws.

A module is imported, and torch with it, when a metric is measured.
"""

import pkgutil

from acp_repro.common import lazy

__getattr__, __dir__ = lazy.names(__name__, {module.name: "" for module in pkgutil.iter_modules(__path__)})
