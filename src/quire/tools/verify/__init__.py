"""Checks of any server that speaks OpenAI's API: `quire verify`."""
