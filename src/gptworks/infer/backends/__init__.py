"""The engine's backends, which compute the model and hold the texts' caches: torch on any device, C++ on a CPU."""
