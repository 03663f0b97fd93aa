"""Records to figures and tables: pandas in, matplotlib out, never torch."""
