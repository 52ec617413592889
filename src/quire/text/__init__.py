"""A tokenizer's files, whatever their format, as those of Hugging Face's `tokenizers`."""

from quire.text.tokenizer_files import tokenizer_files

__all__ = ["tokenizer_files"]
