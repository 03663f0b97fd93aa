"""One page with every figure and table of a suite, and its paper's claims checked against its records."""
