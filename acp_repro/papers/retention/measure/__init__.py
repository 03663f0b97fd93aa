"""Measures: one module a quantity. Each takes a trained run and gives records; none draws."""
