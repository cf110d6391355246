"""Parts of the model for settings from speedruns and recent papers (`gptworks.config.LABORATORY`)."""
