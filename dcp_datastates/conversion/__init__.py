"""Converts checkpoints between this format and those of others, and compares them."""
