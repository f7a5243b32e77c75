"""The system: from a configuration to a trained network, with records and checkpoints."""
