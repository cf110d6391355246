"""The common parts of all pages: the layout, its templates (autoescaped), drawings and charts, one stylesheet."""
