"""Further places of a run's checkpoints: the archive, where they are carried in the background."""
