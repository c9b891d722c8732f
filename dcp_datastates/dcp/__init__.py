"""What this package has to know of how DCP works inside: its threads, its futures, its process group."""
