"""The model: `gptworks.model.gpt.GPT`, one class for every decoder-only architecture."""
