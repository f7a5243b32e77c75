"""Adapters for trainers that own the training loop. Each module needs the extra of its name.

Your own loops, and those with Accelerate and Fabric, need no adapter: they call `objective.loss`.
See docs/how-to/trainers.md.
"""
