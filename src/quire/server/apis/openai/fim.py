"""Fill-in-the-middle prompts for `suffix` (Bavarian et al., 2022)."""

from __future__ import annotations

from typing import NamedTuple

from quire.errors import RequestError
from quire.text.tokenizer import Tokenizer


class Markers(NamedTuple):
    """Special tokens around the two parts of a prompt.

    suffix_first: the model was trained on the suffix, then the prefix, which it continues; it has
    no token before the middle.
    """

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


KNOWN = (
    Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Markers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Markers("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Markers("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)


def markers_of(tokenizer: Tokenizer) -> Markers | None:
    """Returns the first known set that the vocabulary holds completely."""
    has = tokenizer.hub.token_to_id
    for markers in KNOWN:
        if all(has(text) is not None for text in markers[:3] if text):
            return markers
    return None


def infill(tokenizer: Tokenizer, prompt: str | list[int], suffix: str) -> list[int]:
    """Returns the token ids of a prompt whose completion belongs between `prompt` and `suffix`.

    Raises:
        RequestError: the vocabulary has no tokens for this.
    """
    markers = markers_of(tokenizer)
    if markers is None:
        raise RequestError(
            "'suffix' needs a model that fills in the middle, and this one's vocabulary has none "
            "of the tokens for that.",
            param="suffix",
            code="unsupported_parameter",
        )
    before = _ids(tokenizer, prompt) if isinstance(prompt, str) else prompt
    after = _ids(tokenizer, suffix)
    first = [_id(tokenizer, markers.prefix), *before]
    second = [_id(tokenizer, markers.suffix), *after]
    if markers.suffix_first:
        return [*_opening(tokenizer), *second, *first]
    return [*_opening(tokenizer), *first, *second, _id(tokenizer, markers.middle)]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
    return ids


def _id(tokenizer: Tokenizer, token: str) -> int:
    id = tokenizer.hub.token_to_id(token)
    if id is None:
        raise RequestError(f"the vocabulary has no token {token!r}", param="suffix")
    return int(id)


def _opening(tokenizer: Tokenizer) -> list[int]:
    """Returns the token that begins every text, where the tokenizer adds one by itself."""
    bos = tokenizer.special_tokens.get("bos_token")
    added = tokenizer.encode("").tolist()
    return added[:1] if bos is not None and added[:1] == [_id(tokenizer, bos)] else []
