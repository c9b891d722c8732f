"""A place: a directory or an object store, durable file operations, and the decision that commits."""
