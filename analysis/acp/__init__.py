"""Figures and tables of ACP, a module each."""
