"""Vision towers: encoders whose outputs take the place of token embeddings."""
