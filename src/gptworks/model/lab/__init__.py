"""Settings from speedruns and recent papers (`gptworks.config.LABORATORY`): what they add to the model."""
