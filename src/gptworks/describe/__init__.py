"""An architecture and a plan for people to read: sheets, tables, figures and pages."""
