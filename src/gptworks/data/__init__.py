"""From text to batches: sources → documents → token shards → batches. Only `batches` knows torch."""
