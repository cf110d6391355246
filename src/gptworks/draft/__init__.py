"""Draft recipes that suit a folder of texts and this machine, and write them as files with reasons for the settings."""
