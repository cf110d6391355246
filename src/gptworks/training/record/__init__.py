"""What a run writes about itself."""
