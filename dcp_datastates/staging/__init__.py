"""Staging: copies the eager tensors at the call, and reads the deferred ones before they change."""
