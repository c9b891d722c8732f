"""Integration with Accelerate and the Trainer of transformers."""
