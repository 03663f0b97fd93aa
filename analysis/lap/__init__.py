"""The figures and tables of Learnable Attention Pruning, one file each."""
