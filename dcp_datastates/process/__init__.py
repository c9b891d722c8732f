"""Process-wide concerns: forks, exit, memory limits, waiting. Independent of checkpoints."""
