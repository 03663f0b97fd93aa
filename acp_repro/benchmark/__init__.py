"""Kernels against what else computes attention: checked first, then timed."""
