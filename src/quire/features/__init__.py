"""Features: each is a folder, and nothing outside names it."""
