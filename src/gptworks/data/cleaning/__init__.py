"""Filters that clean documents: each looks at one document, or compares all (`duplicates`)."""
