"""The algorithm, which depends only on torch and the standard library."""
