"""The algorithm: torch and the standard library only."""
