"""Kills, faults, contention, and what they leave behind."""
