"""The HTTP API: OpenAI's completions and chat completions, and a few plain routes beside them."""
