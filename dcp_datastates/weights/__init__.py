"""A model's weights, published from each checkpoint for the programs that serve them, and followed there."""
