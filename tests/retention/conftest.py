"""One thread: these models are too little work to share, and threads that spin would cost minutes."""

import torch

torch.set_num_threads(1)
