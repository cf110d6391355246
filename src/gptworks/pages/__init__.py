"""What every page shares: the layout, its templates (autoescaped), drawings and charts, one stylesheet."""
