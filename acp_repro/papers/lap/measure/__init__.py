"""One module a quantity: how a trained run gives its records, their columns, of which runs. None draws."""
