"""The paper's experiments, by name: recipes, tables and figures."""
