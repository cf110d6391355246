"""Read, mask, pack and inspect conversations and pairs of answers."""
