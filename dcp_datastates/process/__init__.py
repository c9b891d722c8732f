"""What a process must mind: forks, its end, its memory, waiting. Knows nothing of checkpoints."""
