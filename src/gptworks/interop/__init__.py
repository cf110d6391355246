"""Other programs' formats: Hugging Face folders in both directions, and GGUF."""
