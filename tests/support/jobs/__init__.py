"""Ranks, processes, networks and threads of test jobs."""
