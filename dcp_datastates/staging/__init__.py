"""What is read at the call, what later, and until when: the deferred reads of a save."""
