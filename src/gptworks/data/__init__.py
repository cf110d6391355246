"""The data pipeline: sources → documents → token shards → batches."""
