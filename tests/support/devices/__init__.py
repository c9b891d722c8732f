"""Devices, real and fake, and programs that write to tensors."""
