"""Features. Each is a folder, and no code outside of this folder names it."""
