"""Records to figures and tables: pandas in, matplotlib out, never torch.

python -m analysis figure2 --suite cpu
"""
