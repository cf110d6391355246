"""The model: `gptworks.model.gpt.GPT`, one class for all architectures that `ModelConfig` describes."""
