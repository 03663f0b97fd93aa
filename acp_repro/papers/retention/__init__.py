"""Adaptive Retention: its suites, its training tasks, and its metrics."""
