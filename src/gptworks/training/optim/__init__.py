"""How weights change: the optimizer, its schedule, and what guards it."""
