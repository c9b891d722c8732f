"""Checkpoints on storage: finding, verifying, describing and deleting them."""
