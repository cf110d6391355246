"""Parts of HTML pages and notebook cells: layout, templates (autoescaped), tables, drawings, charts, stylesheet."""
