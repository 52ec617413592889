"""Adds BOS and EOS tokens by the settings of tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, processors

_CLASSES = "Llama", "CodeLlama", "Gemma", "Cohere"
"""Prefixes of tokenizer classes whose settings take precedence over tokenizer.json in all versions
of transformers. DeepSeek's models and their distillations have no BOS in tokenizer.json."""


def set_ends(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Makes texts begin with BOS if `add_bos_token` is true (the default), and end with EOS if
    `add_eos_token` is true."""
    if not str(config.get("tokenizer_class")).startswith(_CLASSES):
        return
    begins, ends = config.get("add_bos_token") is not False, config.get("add_eos_token") is True
    first = _known(tokenizer, config.get("bos_token")) if begins else []
    last = _known(tokenizer, config.get("eos_token")) if ends else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B", *last],
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in {*first, *last}],
    )


def _known(tokenizer: Tokenizer, token: Any) -> list[str]:
    """Returns the text of a token in the settings, as a list that is empty if the vocabulary does
    not have it."""
    text = str(token["content"] if isinstance(token, Mapping) else token or "")
    return [] if tokenizer.token_to_id(text) is None else [text]
