"""The text model of a config.json that describes several models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError

_WHOLE = ("architectures", "tie_word_embeddings")
"""Keys that count where the whole config has them, as in `transformers`."""
_EITHER = ("bos_token_id", "dtype", "eos_token_id", "torch_dtype")
"""Keys that count there where the text model does not have them."""

PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Beginnings of the text model's names, in checkpoints of transformers 4 and 5."""
VISION = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")
"""Tensors of such a checkpoint that see pictures; they are skipped."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config["text_config"]`, with what the whole config says of all of its models.

    Raises:
        ModelError: it is no object.
    """
    text = config["text_config"]
    if not isinstance(text, Mapping):
        raise ModelError("config.json: text_config must be an object")
    found = dict(text)
    for key in _WHOLE + _EITHER:
        if config.get(key) is not None and (key in _WHOLE or text.get(key) is None):
            found[key] = config[key]
    return found
