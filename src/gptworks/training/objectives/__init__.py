"""What a run learns: a file for each objective."""
