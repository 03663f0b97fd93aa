"""The figures and the table of Learnable Attention Pruning, one file each."""
