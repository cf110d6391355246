"""Filters that clean documents. `duplicates` compares all documents; the others look at one at a time."""
