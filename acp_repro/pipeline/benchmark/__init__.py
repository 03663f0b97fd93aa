"""Times this project's kernels and other attention kernels; each kernel is validated first.

A module is imported, and torch with it, when one of its functions is used.
"""

from acp_repro.common import lazy

__getattr__, __dir__ = lazy.modules(__name__, __path__)
