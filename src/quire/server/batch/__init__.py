"""Files of requests, in OpenAI's batch format."""
