"""A GGUF file's tokenizer as the files of Hugging Face's `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from quire.errors import ModelError
from quire.tokenization.sentencepiece import pair_tokenizer

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
}
"""Patterns that split text before byte-level BPE, by the names that files give them."""
_GPT2 = ("gpt-2", "default")
_CONTROL, _USER = 3, 4
"""Types of tokens: those that text never becomes, and those that are whole wherever they stand."""


def tokenizer_files(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of the tokenizer's files by name; of none where a file has no tokenizer.

    Raises:
        ModelError: a kind of tokenizer that is not known, or settings that make none.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind is None:
        return {}
    try:
        return _files(kind, fields)
    except ModelError:
        raise
    # The library of tokenizers raises nothing more precise.
    except Exception as error:
        raise ModelError(f"the file's tokenizer makes no sense: {error!r}") from error


def _files(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    if kind == "gpt2":
        tokenizer = _byte_level(fields, tokens)
    elif kind == "llama":
        tokenizer = pair_tokenizer(
            tokens,
            fields["tokenizer.ggml.scores"],
            fields.get("tokenizer.ggml.unknown_token_id"),
            prefix=fields.get("tokenizer.ggml.add_space_prefix", True),
        )
    else:
        raise ModelError(f"tokenizers of the kind {kind!r} are not supported; known: gpt2, llama")
    types = fields.get("tokenizer.ggml.token_type") or []
    for token, type in zip(tokens, types, strict=False):
        if type in (_CONTROL, _USER):
            added = AddedToken(token, special=type == _CONTROL, normalized=False)
            (tokenizer.add_special_tokens if type == _CONTROL else tokenizer.add_tokens)([added])
    named = {
        name: tokens[fields[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if fields.get(key) is not None and fields[key] < len(tokens)
    }
    # What llama.cpp does where a file does not say: those of Llama 3 from before 2025 do not.
    usual = kind == "llama" or fields.get("tokenizer.ggml.pre") == "llama-bpe"
    if fields.get("tokenizer.ggml.add_bos_token", usual) and "bos_token" in named:
        bos = named["bos_token"]
        behind = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B"],
            special_tokens=[(bos, fields["tokenizer.ggml.bos_token_id"])],
        )
        byte_level = processors.ByteLevel(trim_offsets=False)
        parts = [byte_level, behind] if kind == "gpt2" else [behind]
        tokenizer.post_processor = processors.Sequence(parts)
    config = dict(named)
    if fields.get("tokenizer.chat_template"):
        config["chat_template"] = fields["tokenizer.chat_template"]
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return {
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": config,
        "generation_config.json": {"eos_token_id": [end for end in ends if end is not None]},
    }


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: place for place, token in enumerate(tokens)}


def _byte_level(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in _PATTERNS and name not in _GPT2:
        known = ", ".join((*_PATTERNS, *_GPT2))
        raise ModelError(f"the file splits text in the way {name!r}; known are: {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    bpe = models.BPE(_vocabulary(tokens), merges, ignore_merges=name == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if name in _GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(_PATTERNS[name]), "isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
