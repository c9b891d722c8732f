"""Storage: directories, attempts, locks and durable file operations on a file system."""
