"""Where text comes from: a class for each kind of source, and `choose`, which finds a recipe's."""
