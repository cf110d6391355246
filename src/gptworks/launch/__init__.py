"""Starts a recipe's run on this machine, or writes and submits a job that starts it on a cluster: `gptworks launch`."""
