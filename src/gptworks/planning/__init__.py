"""Parameters, memory, FLOPs and time of an architecture and a run, by arithmetic: nothing is allocated."""
