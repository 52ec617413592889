"""Converts a GGUF file's tokenizer to the files of Hugging Face's `tokenizers`."""

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
from quire.text.gguf_splitting import SPLITTINGS, Splitting
from quire.text.sentencepiece import pair_tokenizer

_CONTROL, _USER = 3, 4
"""Types of tokens: control tokens, which no text is encoded to, and user-defined tokens, which are
never split."""
_ENDS = frozenset([
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<turn|>", "<|end_of_text|>", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>", "<|observation|>",
    "[|endofturn|]", "<end_of_utterance>",
])  # fmt: skip
"""Control tokens that end an answer. Files often name only one of them, or the end of a text."""


def tokenizer_files(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of the tokenizer's files by name, or {} if the GGUF file has no
    tokenizer.

    Raises:
        ModelError: the kind of tokenizer is not supported, or its settings are invalid.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind is None:
        return {}
    try:
        return _files(kind, fields)
    except ModelError:
        raise
    # The `tokenizers` library raises bare Exceptions.
    except Exception as error:
        raise ModelError(f"the file's tokenizer is invalid: {error!r}") from error


def _files(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    if kind in ("gpt2", "gemma4"):
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
    # This is llama.cpp's default. Files of Llama 3 from before 2025 have no setting.
    usual = kind == "llama" or _splitting(fields).begins
    begin = fields.get("tokenizer.ggml.add_bos_token", usual) and named.get("bos_token")
    end = fields.get("tokenizer.ggml.add_eos_token", False) and named.get("eos_token")
    if begin or end:
        ids = {
            named[f"{key}_token"]: fields[f"tokenizer.ggml.{key}_token_id"]
            for key in ("bos", "eos")
            if f"{key}_token" in named
        }
        one, two = ([*filter(None, [begin, part, end])] for part in ("$A", "$B"))
        around = processors.TemplateProcessing(
            single=one,
            pair=one + two,
            special_tokens=[(token, ids[token]) for token in {begin, end} if token],
        )
        byte_level = processors.ByteLevel(trim_offsets=False)
        parts = [byte_level, around] if kind == "gpt2" else [around]
        tokenizer.post_processor = processors.Sequence(parts)
    config = dict(named)
    if fields.get("tokenizer.chat_template"):
        config["chat_template"] = fields["tokenizer.chat_template"]
    found = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found += [
        place
        for place, (token, type) in enumerate(zip(tokens, types, strict=False))
        if type == _CONTROL and token in _ENDS
    ]
    ends = sorted({place for place in found if place is not None})
    return {
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": config,
        "generation_config.json": {"eos_token_id": ends},
    }


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: place for place, token in enumerate(tokens)}


def _splitting(fields: Mapping[str, Any]) -> Splitting:
    """Returns how a file's tokenizer splits text. Raises ModelError if it is not supported."""
    # Older files of Gemma 4 do not have the setting.
    usual = "gemma4" if fields.get("tokenizer.ggml.model") == "gemma4" else "default"
    name = fields.get("tokenizer.ggml.pre", usual)
    if name not in SPLITTINGS:
        known = ", ".join(sorted(SPLITTINGS))
        raise ModelError(f"tokenizer.ggml.pre is {name!r}; expected one of: {known}")
    return SPLITTINGS[name]


def _byte_level(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    splitting = _splitting(fields)
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = _vocabulary(tokens)
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns
    ]
    if splitting.characters:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        bpe = models.BPE(vocabulary, merges, ignore_merges=splitting.whole_first)
        tokenizer = Tokenizer(bpe)
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.decoder = decoders.ByteLevel()
    if splitting.normalized:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return tokenizer
