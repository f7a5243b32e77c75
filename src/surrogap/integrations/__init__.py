"""Adapters for trainers that own the training loop. Each module needs the extra of its name.

Loops of one's own, and those of Accelerate and Fabric, need no adapter: they call `objective.loss`.
See docs/how-to/trainers.md.
"""
