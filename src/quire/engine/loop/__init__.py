"""The engine's loop, and what goes into it and comes out."""
