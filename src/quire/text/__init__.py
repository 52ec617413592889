"""Tokenizers, detokenization and chat templates."""

from quire.text.tokenizer_files import tokenizer_files

__all__ = ["tokenizer_files"]
