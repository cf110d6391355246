"""From text to batches: sources → documents → token shards → batches."""
