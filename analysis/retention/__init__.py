"""The tables and figures of Adaptive Retention, one file each, and the paper's values."""
