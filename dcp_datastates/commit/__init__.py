"""Committed or absent: how the ranks of a save agree on what becomes of it."""
