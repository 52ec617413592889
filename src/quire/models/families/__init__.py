"""Families of checkpoints, one module each: their config.json and the names of their tensors."""
