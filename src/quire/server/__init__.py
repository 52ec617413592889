"""The HTTP server: OpenAI's and Anthropic's APIs, and a few routes of its own."""
