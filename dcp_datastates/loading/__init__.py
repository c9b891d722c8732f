"""One load: each rank fits its state to the checkpoint, the ranks agree, and each reads its part."""
