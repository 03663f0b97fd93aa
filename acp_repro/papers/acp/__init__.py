"""Adaptive Computation Pruning for the Forgetting Transformer."""
