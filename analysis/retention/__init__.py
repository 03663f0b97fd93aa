"""Tables and figures of Adaptive Retention: one module each, `criteria`, and what the paper prints."""
