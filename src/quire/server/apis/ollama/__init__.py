"""Ollama's API, with `--ollama-api`."""
