"""Long texts in pieces, which the `tokenizers` library encodes on several cores.

A tokenizer of this kind splits text by regular expressions before it merges bytes. None of the
expressions below matches a letter and the space behind it. So a token ends there, whatever lies
around, and the pieces' tokens one after the other are the text's tokens.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

from quire.text.gguf_splitting import SPLITTINGS

_FAMILIES = ("llama3", "qwen2", "qwen35", "gpt-4o", "deepseek-v3", "smollm", "tekken")
_PATTERNS = frozenset(pattern for name in _FAMILIES for pattern in SPLITTINGS[name].patterns)
_OTHERS = frozenset({r"\p{N}", *SPLITTINGS["deepseek-v3"].patterns[:2]})
"""Patterns of numbers and of Han characters. They leave words and spaces together."""
_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_GAP = re.compile(r"[A-Za-z](?= [A-Za-z])")
_PIECE = 800
"""Fewest characters of a piece. A core encodes them in about half a millisecond."""


def separates_words(hub: HubTokenizer) -> bool:
    """Returns whether every token ends at the gaps where `cut_at_gaps` cuts."""
    normalizer, splitter = _settings(hub.normalizer), _settings(hub.pre_tokenizer)
    if normalizer and normalizer["type"] not in _NORMALIZERS:
        return False
    # Such a token may lie across a gap.
    added = hub.get_added_tokens_decoder().values()
    if any(" " in token.content or token.rstrip for token in added):
        return False
    steps = splitter.get("pretokenizers", [splitter])
    kinds = [_splits(step) for step in steps]
    if None in kinds or "words" not in kinds:
        return False
    # After a byte-level step a space is the character Ġ, which patterns take for a letter.
    before = steps[: kinds.index("words")]
    return all(step["type"] != "ByteLevel" for step in before)


def _settings(part: Any) -> dict[str, Any]:
    """Returns a part's settings. Its state is JSON."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _splits(step: dict[str, Any]) -> str | None:
    """Returns "words" for a step that splits at gaps, "" for one that does not mind them, and None
    for an unknown one."""
    kind = step.get("type")
    if kind == "ByteLevel":
        known = not step["add_prefix_space"]
        return ("words" if step.get("use_regex", True) else "") if known else None
    if kind == "Digits":
        return ""
    if kind != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return None
    pattern = step["pattern"].get("Regex")
    if pattern not in _PATTERNS:
        return None
    return "" if pattern in _OTHERS else "words"


def cut_at_gaps(text: str) -> list[str]:
    """Returns the pieces of a text, each cut behind a word that a space and a word follow."""
    pieces, start = [], 0
    while len(text) - start > 2 * _PIECE:
        gap = _GAP.search(text, start + _PIECE)
        if gap is None:
            break
        pieces.append(text[start : gap.end()])
        start = gap.end()
    return [*pieces, text[start:]]
