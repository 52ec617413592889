"""The known families. Adding one is a module in `families/` and a line in architectures.json."""

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
"""The architectures of config.json, and the families whose modules build them."""


def family_named(name: str | None) -> Family | None:
    """Returns a family, whose module is imported when it is used; None: there is none."""
    if name not in ARCHITECTURES.values():
        return None
    family: Family = importlib.import_module(f"{_FAMILIES}.{name}").FAMILY
    return family


# From a model's name to its folder, its config.json and its `ModelSpec`.

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model_path(model: str | None, revision: str | None = None) -> Path:
    """The folder of `model`: itself if it is one, a download if it is a hub id, the embedded model
    if it is None. Raises ModelError where there is nothing."""
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
    """Tells whether `model` names nothing in the file system, and may be a hub id."""
    # Unlike Path's, these answer for any text: a name that is too long, a user who is not there.
    return _HUB_ID.fullmatch(model) is not None and not os.path.exists(os.path.expanduser(model))


def load_config(path: str | Path, name: str = "config.json") -> dict[str, Any]:
    """The folder's config.json, or another file like it, as a dict."""
    file = Path(path) / name
    try:
        config = json.loads(read_bounded(file))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is not a model folder: it has no {name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return config


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The architecture that config.json describes. Raises ModelError for one that is unknown, and
    for values that make no sense."""
    names = [str(name) for name in settings.several(config, "architectures")]
    known = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    family = family_named(known if names else str(config.get("model_type")))
    if family is None:
        found = ", ".join(names) or config.get("model_type") or "none"
        raise ModelError(
            f"unknown architecture: {found}. Known are: {', '.join(sorted(ARCHITECTURES))}"
        )
    if "text_config" in config:
        config = text_config(config)
    unsupported.check(config, family.implements)
    return family.spec(config)
