"""Runs of the engine for one request: from prompts or a dialogue to text and events."""
