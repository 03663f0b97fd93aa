"""One module a quantity: its columns, its runs, and how a trained run gives its records. None draws."""
