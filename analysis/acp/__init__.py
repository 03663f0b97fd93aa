"""Figures and tables of ACP, one module each."""
