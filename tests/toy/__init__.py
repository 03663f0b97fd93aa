"""The smallest paper, as if from outside: a regression of five numbers, one quantity, one figure."""
