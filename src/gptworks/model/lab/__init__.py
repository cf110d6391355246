"""Model parts for the laboratory's settings, from speedruns and recent papers (`gptworks.config.LABORATORY`)."""
