"""A tokenizer's files, whatever their format, as those of Hugging Face's `tokenizers`."""

from quire.tokenization.files import tokenizer_files

__all__ = ["tokenizer_files"]
