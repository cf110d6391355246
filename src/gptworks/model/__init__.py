"""The model: one class, `gptworks.model.gpt.GPT`, for every decoder-only variant."""
