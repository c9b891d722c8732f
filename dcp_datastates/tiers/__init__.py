"""Further places of a run's checkpoints: the archive, where they are carried behind training."""
