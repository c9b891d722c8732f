"""Input and output: tensors, the native engine and files; restores tensors from committed files."""
