"""The common parts of all pages: the layout, its templates (autoescaped), drawings, charts and the stylesheet."""
