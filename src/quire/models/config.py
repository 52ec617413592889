"""Finds a model's folder, reads its config.json, and looks up the family that builds its spec.

A new family needs a module in `families/` and a line in architectures.json.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.models.families import settings, unsupported
from quire.models.families.family import Family
from quire.models.families.text_config import text_config
from quire.models.files import download
from quire.models.gguf.folder import folder_of
from quire.models.spec import ModelSpec
from quire.system import read_bounded

_FAMILIES = "quire.models.families"

ARCHITECTURES: dict[str, str] = json.loads(
    resources.files(_FAMILIES).joinpath("architectures.json").read_text(encoding="utf-8")
)
"""Maps architectures, as config.json names them, to modules in `families/`."""


def family_named(name: str | None) -> Family | None:
    """Imports and returns a family by its name, or returns None for an unknown name."""
    if name not in ARCHITECTURES.values():
        return None
    family: Family = importlib.import_module(f"{_FAMILIES}.{name}").FAMILY
    return family


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model_path(model: str | None, revision: str | None = None) -> Path:
    """Returns the folder of a model.

    Args:
        model: a folder, a GGUF file, or an id on the Hugging Face hub, whose files are downloaded.
            None means the model that is embedded in the package.
        revision: revision of a model on the hub.

    Raises:
        ModelError: there is no such model.
    """
    if model is None:
        return Path(str(resources.files("quire") / "embedded" / "quire-tiny"))
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        return folder_of(path)
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"no such model folder: {model}")
    return download(model, revision)


def is_hub_id(model: str) -> bool:
    """Returns whether `model` has the form of a hub id and names nothing in the file system."""
    # `os.path.exists` accepts any text; Path's methods raise for long names or unknown users.
    return _HUB_ID.fullmatch(model) is not None and not os.path.exists(os.path.expanduser(model))


def load_config(path: str | Path, name: str = "config.json") -> dict[str, Any]:
    """Returns the content of a folder's config.json, or of another JSON file.

    Raises:
        ModelError: the file is missing, cannot be read, or holds no JSON object.
    """
    file = Path(path) / name
    if not file.exists():
        raise ModelError(f"{path} is not a model folder: it has no {name}")
    config = load_json(file)
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return config


def load_json(file: Path) -> Any:
    """Returns the content of a JSON file. Raises ModelError if it cannot be read."""
    try:
        return json.loads(read_bounded(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of the architecture that config.json names.

    Raises:
        ModelError: the architecture is unknown.
    """
    names = [str(name) for name in settings.several(config, "architectures")]
    known = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    family = family_named(known if names else str(config.get("model_type")))
    if family is None:
        found = ", ".join(names) or config.get("model_type") or "none"
        raise ModelError(
            f"unknown architecture: {found}; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return family


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the architecture that config.json describes.

    Raises:
        ModelError: the architecture is unknown, or a value is invalid or not supported.
    """
    family = family_of(config)
    if "text_config" in config:
        config = text_config(config)
    unsupported.check(config, family.implements)
    return family.spec(config)
