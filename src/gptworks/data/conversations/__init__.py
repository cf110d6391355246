"""Read, encode, pack and inspect conversations and preference pairs."""
