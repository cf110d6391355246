"""Exchange with other programs: Hugging Face folders, PEFT adapters, GGUF files and lm-evaluation-harness."""
