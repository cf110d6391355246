"""Records and displays of a run."""
