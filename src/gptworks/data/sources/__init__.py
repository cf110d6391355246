"""Sources of text: a class for each kind, and `choose`, which returns a recipe's source."""
