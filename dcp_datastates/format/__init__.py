"""The formats of a checkpoint's files. Pure functions, which access no file."""
