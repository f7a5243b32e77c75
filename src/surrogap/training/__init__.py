"""The training system: a run from one configuration, with records and checkpoints."""
