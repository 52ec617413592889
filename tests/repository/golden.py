"""The public interfaces as text: commands, the API, signatures, error codes, metrics.

`python -m tests.repository.golden` writes the files in `tests/repository/golden/`, and
`test_golden.py` compares them. A change to one of them is a change for users, so CHANGELOG.md names
it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main

import quire
from quire.cli.main import app
from quire.server.openapi import document

FOLDER = Path(__file__).with_name("golden")
SOURCE = Path(quire.__file__).parent


def commands() -> dict[str, Any]:
    """Returns each command's options: flags, variables, defaults and metavars."""
    found: dict[str, Any] = {}

    def visit(name: str, command: Any) -> None:
        found[name] = {
            parameter.name: _known(
                flags=[*parameter.opts, *parameter.secondary_opts],
                kind=parameter.param_type_name,
                variable=parameter.envvar,
                default=repr(parameter.default),
                many=parameter.multiple or parameter.nargs != 1,
                required=parameter.required,
                metavar=parameter.metavar,
            )
            for parameter in command.params
        }
        for child, inner in getattr(command, "commands", {}).items():
            visit(f"{name} {child}", inner)

    visit("quire", typer.main.get_command(app))
    return found


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, False)}


def openapi() -> Any:
    """Returns the API's document: routes, fields, types, defaults and answers."""
    return document(keys=True)


def signatures() -> dict[str, Any]:
    """Returns the public classes: their fields, and their methods' parameters."""
    found: dict[str, Any] = {}
    for name in quire.__all__:
        value = getattr(quire, name)
        if not inspect.isclass(value):
            continue
        members = {
            key: str(inspect.signature(member))
            for key, member in inspect.getmembers(value, callable)
            if (not key.startswith("_") or key == "__init__") and _is_own(member)
        }
        if dataclasses.is_dataclass(value):
            members["fields"] = ", ".join(f.name for f in dataclasses.fields(value))
        elif hasattr(value, "__struct_fields__"):
            members["fields"] = ", ".join(value.__struct_fields__)
        found[name] = members
    return found


def _is_own(member: Any) -> bool:
    return str(getattr(member, "__module__", "")).startswith("quire")


def errors() -> dict[str, list[str]]:
    """Returns the constants of errors: codes, types and parameters."""
    found: dict[str, set[str]] = {"code": set(), "param": set(), "type": set()}
    for node in _nodes():
        if isinstance(node, ast.Call):
            name = _name(node.func)
            if not name.endswith("Error"):
                continue
            for keyword in node.keywords:
                if keyword.arg in found:
                    found[keyword.arg] |= set(_texts(keyword.value))
            if len(node.args) > 1:
                found["param"] |= set(_texts(node.args[1]))
        elif isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
            for inner in node.body:
                target = inner.targets[0] if isinstance(inner, ast.Assign) else None
                if isinstance(target, ast.Name) and target.id in found:
                    found[target.id] |= set(_texts(inner.value))
    return {kind: sorted(values) for kind, values in found.items()}


def metrics() -> list[str]:
    """Returns the names of metrics, without the prefix where the source adds it."""
    names = {text for node in _nodes() for text in _texts(node) if _METRIC.fullmatch(text)}
    return sorted(names)


_METRIC = re.compile(r"(quire|vllm)[_:][a-z0-9_]+")


def _nodes() -> Iterator[ast.AST]:
    for path in SOURCE.rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text("utf-8")))


def _name(node: ast.expr) -> str:
    return getattr(node, "id", None) or getattr(node, "attr", "")


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


GOLDEN: dict[str, Callable[[], Any]] = {
    "commands": commands,
    "openapi": openapi,
    "signatures": signatures,
    "errors": errors,
    "metrics": metrics,
}


def text_of(name: str) -> str:
    return json.dumps(GOLDEN[name](), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in GOLDEN:
        (FOLDER / f"{name}.json").write_text(text_of(name), "utf-8")


if __name__ == "__main__":
    main()
