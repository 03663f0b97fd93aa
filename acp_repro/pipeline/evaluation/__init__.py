"""Downstream tasks through the LM Evaluation Harness (Tables 1 and 3); needs ``pip install -e '.[eval]'``."""
