"""Show architectures and plans: sheets, tables, figures and pages."""
