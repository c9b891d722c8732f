"""Integration with DeepSpeed, whose configuration and source stay as they are."""
