"""The engine's loop, its input and its output."""
