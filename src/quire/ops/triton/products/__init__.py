"""Products of tokens and weights, and what surrounds them."""
