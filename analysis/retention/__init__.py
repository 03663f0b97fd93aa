"""Tables and figures of Adaptive Retention: one file each, and what the paper prints."""
