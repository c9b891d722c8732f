"""Agreement and publication: a save is committed on all ranks, or absent."""
