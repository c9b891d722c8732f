"""Checkpoints for a training loop: when to save, what to keep, when to stop, where to go on."""
