"""Checkpoints as they lie on storage: finding, verifying, describing and deleting them."""
