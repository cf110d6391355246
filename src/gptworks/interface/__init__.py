"""What a program or a notebook calls, and the commands too: `gptworks.train`, `gptworks.plan`, `gptworks.evaluate`."""
