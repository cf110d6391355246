"""Shows architectures, plans and datasets as text, tables, diagrams and HTML pages."""
