"""OpenAI's completions, chat completions and embeddings APIs, and vLLM's tokenizer routes."""
