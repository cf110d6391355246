"""Exchange with other programs: Hugging Face's folders and hub, PEFT adapters, GGUF and HTML files, and
lm-evaluation-harness."""
