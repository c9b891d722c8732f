"""Storage: attempts, locks and durable file operations."""
