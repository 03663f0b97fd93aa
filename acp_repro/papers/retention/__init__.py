"""Adaptive Retention re-run: its registry, how its models are trained, what is measured of them."""
