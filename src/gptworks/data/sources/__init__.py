"""Sources of text: a class for each kind, and `choose`, which finds the class for a recipe's source."""
