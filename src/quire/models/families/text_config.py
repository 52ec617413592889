"""Extracts the text model from a config.json that describes several models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError

_OUTER = ("architectures", "tie_word_embeddings")
"""Keys whose value in the outer config takes precedence, as in `transformers`."""
_INHERITED = ("bos_token_id", "dtype", "eos_token_id", "quantization_config", "torch_dtype")
"""Keys that are read from the outer config if the text config does not have them."""

PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Replacements for prefixes of the text model's names, in checkpoints of transformers 4 and 5."""
VISION = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")
"""Tensors of the vision model, which are skipped."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config["text_config"]`, completed with the outer config's keys for all models.

    Raises:
        ModelError: `text_config` is not an object.
    """
    text = config["text_config"]
    if not isinstance(text, Mapping):
        raise ModelError("config.json: text_config must be an object")
    found = dict(text)
    for key in _OUTER + _INHERITED:
        if config.get(key) is not None and (key in _OUTER or text.get(key) is None):
            found[key] = config[key]
    return found
