"""Checkpoints, states, plans and metadata."""
