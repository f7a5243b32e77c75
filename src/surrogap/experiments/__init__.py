"""Experiments: recipes by name, runs side by side, tables and figures from records."""
