"""Reads the files that `sentence-transformers` puts beside a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from quire.errors import ModelError
from quire.models.config import load_config, load_json
from quire.models.families.settings import MOST_FEATURES
from quire.pooling_params import POOLINGS, Pooling

DenseActivation = Literal["identity", "tanh", "gelu", "relu"]

_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
"""Kinds of modules in the only order that is supported. Each may be missing or repeated."""
_LAST_TOKEN: dict[str, Pooling] = {"lasttoken": "last"}
_ACTIVATIONS: dict[str, DenseActivation] = {
    "Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A product behind the pooling.

    Attributes:
        folder: the folder with its weights.
        inputs: numbers of an input.
        outputs: numbers of an output.
        bias: whether it has a bias.
        activation: applied to the result.
    """

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: DenseActivation


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """The settings of a model as `sentence-transformers` publishes them.

    Attributes:
        pooling: how a text's states become one; None: the files do not say, or leave them apart.
        tokens: whether a text has a vector for each token (late interaction).
        dense: products of the vectors, in order.
        longest: most tokens of a text, or None.
        prompts: texts before inputs, by name.
        default_prompt: name of the prompt of inputs without one, or None.
    """

    pooling: Pooling | None = None
    tokens: bool = False
    dense: tuple[DenseModule, ...] = ()
    longest: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_sentence_files(folder: Path) -> SentenceFiles:
    """Returns the settings of a model's folder.

    Raises:
        ModelError: a file is malformed, or asks for something that is not supported.
    """
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    pooled = "Pooling" in kinds or not modules
    where = next((path for kind, path in modules if kind == "Pooling"), folder / "1_Pooling")
    prompts, default = _prompts(folder)
    return SentenceFiles(
        pooling=_pooling(where, bool(prompts)) if pooled else None,
        tokens=bool(modules) and not pooled,
        dense=tuple(_dense(path) for kind, path in modules if kind == "Dense"),
        longest=_longest(folder),
        prompts=prompts,
        default_prompt=default,
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Returns the kind and the folder of each part in modules.json; [] without that file."""
    file = folder / "modules.json"
    if not file.exists():
        return []
    given = load_json(file)
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise ModelError(f"{file} must hold a list of objects")
    found = []
    for each in given:
        kind = str(each.get("type")).rpartition(".")[2]
        if kind not in _ORDER:
            raise ModelError(
                f"{file}: a module of type {each.get('type')!r} is not supported; expected one of: "
                f"{', '.join(_ORDER)}"
            )
        path = _inside(folder, str(each.get("path", "")))
        if path is None:
            raise ModelError(f"{file}: the path {each.get('path')!r} is outside of the folder")
        found.append((kind, path))
    kinds = [kind for kind, _ in found]
    if kinds != sorted(kinds, key=_ORDER.index):
        raise ModelError(
            f"{file}: the modules {', '.join(kinds)} are not supported in this order; expected: "
            f"{', '.join(_ORDER)}"
        )
    return found


def _inside(folder: Path, name: str) -> Path | None:
    """Returns the path of a module's folder, or None if it is outside of the model's folder."""
    try:
        path = (folder / name).resolve()
        path.exists()
    except (OSError, ValueError):  # The name is too long, or holds a null character.
        return None
    return path if path.is_relative_to(folder.resolve()) else None


def _pooling(path: Path, prompts: bool) -> Pooling | None:
    """Returns the pooling of a folder, or None if it has no config.json."""
    if not (path / "config.json").exists():
        return None
    config = load_config(path)
    if config.get("include_prompt") is False and prompts:
        raise ModelError(f"{path}/config.json: include_prompt=false is not supported")
    mode = config.get("pooling_mode")
    if mode is not None:
        named = _LAST_TOKEN.get(str(mode), mode)
        if named not in POOLINGS:
            raise ModelError(f"{path}/config.json: pooling_mode {mode!r} is not supported")
        return cast(Pooling, named)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode") and value]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]]
    raise ModelError(
        f"{path}/config.json: {', '.join(modes) or 'no pooling mode'} is not supported; expected "
        f"one of: {', '.join(_MODES)}"
    )


def _dense(path: Path) -> DenseModule:
    config = load_config(path)
    sizes = config.get("in_features"), config.get("out_features")
    activation = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if not all(type(size) is int and 0 < size <= MOST_FEATURES for size in sizes):
        raise ModelError(
            f"{path}/config.json: in_features and out_features must be integers from 1 to "
            f"{MOST_FEATURES}, got {sizes[0]!r} and {sizes[1]!r}"
        )
    if config.get("use_residual"):
        raise ModelError(f"{path}/config.json: use_residual is not supported")
    if activation not in _ACTIVATIONS:
        raise ModelError(
            f"{path}/config.json: activation_function {activation!r} is not supported; expected "
            f"one of: {', '.join(_ACTIVATIONS)}"
        )
    inputs, outputs = cast("tuple[int, int]", sizes)
    bias = config.get("bias", True) is not False
    return DenseModule(path, inputs, outputs, bias, _ACTIVATIONS[activation])


def _longest(folder: Path) -> int | None:
    """Returns the longest text of sentence_bert_config.json."""
    file = "sentence_bert_config.json"
    config = load_config(folder, file) if (folder / file).exists() else {}
    if config.get("do_lower_case") is True:
        raise ModelError(f"{folder / file}: do_lower_case is not supported")
    longest = config.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ModelError(f"{folder / file}: max_seq_length must be positive, got {longest!r}")
    return longest


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    file = "config_sentence_transformers.json"
    config: dict[str, Any] = load_config(folder, file) if (folder / file).exists() else {}
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise ModelError(f"{folder / file}: prompts must be texts by name")
    default = config.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ModelError(f"{folder / file}: default_prompt_name {default!r} is none of its prompts")
    return prompts, default
