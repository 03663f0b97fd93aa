"""One module a metric: its columns, its runs, and how a trained run gives its records. None draws."""
