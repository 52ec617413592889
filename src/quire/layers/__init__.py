"""The building blocks of models."""
