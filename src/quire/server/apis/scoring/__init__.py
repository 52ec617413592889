"""Embeddings, scores and ranks of texts."""
