"""Who asks, what they may, and how long: one HTTP request's context."""
