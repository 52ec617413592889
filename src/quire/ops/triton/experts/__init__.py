"""The feed-forward layers of experts."""
