"""What an architecture and a run cost, by arithmetic only: nothing is allocated."""
