"""Which processes there are, whether they are alive, and how they speak with each other."""
