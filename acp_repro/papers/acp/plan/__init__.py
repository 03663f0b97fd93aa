"""What a suite of Forgetting Transformers costs, by formula and by what was measured. Needs no torch."""
