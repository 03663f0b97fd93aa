"""One page with every figure and table of a suite, and its paper's claims checked against its records.

python -m analysis.report --suite cpu        # writes figures/cpu/report.md and report.html
"""
