"""Other programs' formats: Hugging Face folders, PEFT adapters, GGUF files and lm-evaluation-harness."""
