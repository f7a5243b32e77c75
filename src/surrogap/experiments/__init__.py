"""Experiments: recipes, comparisons of runs, and measurements of trained models."""
