"""The figures, table and criteria of Learnable Attention Pruning."""
