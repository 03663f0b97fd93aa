"""Records to figures and tables: pandas in, matplotlib out, never torch.

python -m analysis.acp.figure2 --suite cpu
"""
