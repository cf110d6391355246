"""What a run learns: a file for each objective, and `choose`, which finds a recipe's."""
