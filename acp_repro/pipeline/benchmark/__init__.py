"""Times this project's kernels and other attention kernels; each kernel is validated first.

A module is imported, and torch with it, when one of its functions is used.
"""

import pkgutil

from acp_repro.common import lazy

__getattr__, __dir__ = lazy.names(__name__, {module.name: "" for module in pkgutil.iter_modules(__path__)})
