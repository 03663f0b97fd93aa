"""One thread: models of a few thousand weights are too little work to share, and threads that spin cost minutes."""

import torch

torch.set_num_threads(1)
