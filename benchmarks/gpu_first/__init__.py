"""The first half hour on a GPU: facts, bare hardware, tests, latencies and saves, in ten minutes at most.

``make gpu-first`` runs the steps of :mod:`gpu_first.steps`, each in a process of its own, and leaves one JSON and one
page of text. ``make gpu-first SMOKE=1`` runs every step on the host, at a tiny size, to find typing errors before a
machine is rented.
"""
