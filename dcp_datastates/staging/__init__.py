"""What is read at the call, what later, and until when: the snapshot behind a save."""
