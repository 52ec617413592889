"""Moves of KV blocks between the device and other places."""
