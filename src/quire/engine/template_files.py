"""A model folder's chat templates, as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.weight_files import read_bounded


def load_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns a folder's templates by name: "default", and if there is one "tool_use".

    A file `chat_template.jinja` goes before those of tokenizer_config.json; more may be in
    `additional_chat_templates/`.
    """
    found: dict[str, str] = {}
    template = config.get("chat_template")
    if isinstance(template, str):
        found["default"] = template
    elif isinstance(template, list):
        found = {entry["name"]: entry["template"] for entry in template}
    file = folder / "chat_template.jinja"
    if file.exists():
        found["default"] = read_bounded(file).decode()
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = read_bounded(file).decode()
    return found
