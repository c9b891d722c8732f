"""The meaning of bytes: what the files of a checkpoint say. Pure functions; no file is touched."""
