"""The context of one HTTP request: its key, its limits, its deadline."""
