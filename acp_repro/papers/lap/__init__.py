"""Learnable Attention Pruning."""
