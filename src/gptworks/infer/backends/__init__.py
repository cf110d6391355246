"""What computes a model for the engine, and the caches of the texts: torch on any device, C++ on a CPU."""
