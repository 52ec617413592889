"""Reading the files of a model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.weight_files import MOST_TABLE, read_bounded


def tokenizer_files(folder: Path) -> tuple[str, dict[str, Any]]:
    """Returns the text of a folder's tokenizer.json and its tokenizer_config.json, or what another
    format becomes.

    Raises:
        ModelError: there is no tokenizer, or one of a kind that is not known.
    """
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config = json.loads(read_bounded(settings)) if settings.exists() else {}
    if file.exists():
        return read_bounded(file, MOST_TABLE).decode(), config
    # Few models have no such file.
    from quire.tokenization.formats import converted

    return converted(folder, config)
