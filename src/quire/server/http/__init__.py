"""The layers around every route: request context, API keys, rate limits and error responses."""
