"""Where bytes go."""
