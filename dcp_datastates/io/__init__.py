"""Tensors, the native engine, and files: moving bytes, and restoring them."""
