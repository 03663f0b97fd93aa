"""Uses one thread: these models are too small for several, and spinning threads would cost minutes."""

import importlib.util

import torch

torch.set_num_threads(1)
if importlib.util.find_spec("transformers") is None:  # pip install -e '.[retention,lap]'
    collect_ignore_glob = ["*.py"]
