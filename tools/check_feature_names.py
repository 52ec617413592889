"""Fails where the engine, the scheduler, the runner, `LLM` or the server's state names a feature.

Features reach them through small interfaces only (`features/spec.py`, `features/loop_feature.py`,
`scheduler/feature.py`, `runner/hooks/hook.py`). A feature's name in their code would be the first
step to a branch for it. So identifiers, imports and string literals are searched; comments and
docstrings may explain the interfaces.

The banned names are those of the features' packages and their modules, and further words of
features. Each checked file may be exempt from some words, for a reason (`ALLOWED`). An exemption
that no code needs is an error too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "quire"

FEATURES = SOURCE / "features"
PACKAGES = tuple(sorted(path.name for path in FEATURES.iterdir() if path.is_dir()))
WORDS = (
    "adapter", "lora", "speculat", "ngram", "eagle", "medusa", "grammar", "guidance",
    "json_schema", "(?<!re)vision", "multimodal", "pooler", "gate", "mask", "tenant", "transfer",
    "disk", "redundant_experts", "tune_tables", "kv_peers",
)  # fmt: skip
COMMON = (
    "api", "args", "calls", "costs", "feature", "fields", "hook", "listener", "loop", "messages",
    "metrics", "patterns", "placement", "registry", "settings", "stats",
)  # fmt: skip
"""Module names of features that say nothing."""

CHECKED = ("engine", "runner", "scheduler", "server/state.py", "llm.py", "executor.py")

_MOVES = "a plan moves blocks, for any feature"
_HEADS = "heads can wait for what the host submits, for any feature"
_PLACES = "the kinds of places that features' hooks open"
_BOOLS = "Mask is the type of an array of booleans"
_TENANTS = "a request's tenant is a field of every request, which fair queues read"
_VECTORS = "embeddings are a result of the engine, as tokens are: LLM.embed is what users call"
ALLOWED: dict[str, dict[str, str]] = {
    "engine/builder.py": {"tenant": _TENANTS},
    "engine/encoders.py": {
        "pooling": _VECTORS,
        "sentence_files": "an encoder's files say how long its texts are",
    },
    "engine/loop/embedding.py": {"pooling": _VECTORS},
    "engine/loop/text_scores.py": {"pooling": _VECTORS},
    "engine/loop/messages.py": {"tenant": _TENANTS},
    "engine/loop/prompts.py": {"pooling": _VECTORS},
    "engine/loop/trace.py": {"transfer": _MOVES},
    "engine/process/client.py": {"tenant": _TENANTS},
    "engine/process/completions.py": {"mask": _BOOLS},
    "engine/process/process.py": {"tenant": _TENANTS},
    "engine/ranks/async_tp.py": {"gate": "shared_gate is a part of experts, in a ModelSpec"},
    "llm.py": {
        "lora": "lora_request is vLLM's keyword; the feature reads its value",
        "pooling": _VECTORS,
    },
    "runner/": {"gate": _HEADS, "transfer": _MOVES},
    "runner/hooks/": {"mask": "a head's level, and the hook of masks"},
    "runner/host_inputs.py": {"mask": "the file of the op that waits for host inputs"},
    "runner/transfer/": dict.fromkeys(("disk", "export", "facts", "peer", "tiers"), _PLACES),
    "scheduler/fair_share": {"mask": _BOOLS, "tenant": _TENANTS},
    "scheduler/admission.py": {"pooling": _VECTORS},
    "scheduler/feature.py": {"gate": _HEADS, "transfer": _MOVES},
    "scheduler/order.py": {"mask": _BOOLS, "tenant": _TENANTS},
    "scheduler/scheduler.py": {"transfer": _MOVES},
    "scheduler/text_scheduler.py": {"transfer": _MOVES},
    "server/state.py": {"tenant": _TENANTS},
}
"""By the beginning of a file's path, the words that it may use, and why."""


def main() -> int:
    found = [finding for file in checked_files() for finding in findings(file, banned(file))]
    found += [f"{prefix}: no code needs the exemption for {word!r}" for prefix, word in unused()]
    for finding in found:
        print(finding)
    return 1 if found else 0


def unused() -> Iterator[tuple[str, str]]:
    """Yields exemptions that no code needs, by prefix and word."""
    for prefix, words in ALLOWED.items():
        files = [f for f in checked_files() if f.relative_to(SOURCE).as_posix().startswith(prefix)]
        for word in words:
            names_it = re.compile(word, re.IGNORECASE)
            if not any(True for file in files for _ in findings(file, names_it)):
                yield prefix, word


def checked_files() -> Iterator[Path]:
    for name in CHECKED:
        path = SOURCE / name
        if path.is_dir():
            yield from sorted(path.rglob("*.py"))
        elif path.exists():
            yield path


def feature_names() -> set[str]:
    """Returns the names of features' packages and of their modules."""
    names = set(PACKAGES)
    for package in PACKAGES:
        names |= {file.stem for file in (FEATURES / package).rglob("*.py")}
    return {name.strip("_") for name in names} - set(COMMON) - {"init"}


def allowed_words(place: str) -> set[str]:
    return {w for prefix, words in ALLOWED.items() if place.startswith(prefix) for w in words}


def banned(file: Path) -> re.Pattern[str]:
    """Returns what a file may not name: words anywhere, feature names as whole words."""
    place = file.relative_to(SOURCE).as_posix()
    allowed = allowed_words(place)
    anywhere = "|".join(word for word in WORDS if word not in allowed)
    names = sorted(n for n in feature_names() if not any(word in n for word in allowed))
    whole = "|".join(map(re.escape, names))
    return re.compile(rf"{anywhere}|(?<![a-z])(?:{whole})(?![a-z])", re.IGNORECASE)


def findings(file: Path, pattern: re.Pattern[str]) -> Iterable[str]:
    tree = ast.parse(file.read_text())
    docstrings = set(docstrings_of(tree))
    for node in ast.walk(tree):
        for text in names(node, docstrings):
            if pattern.search(text):
                line = getattr(node, "lineno", 0)
                yield f"{file.relative_to(SOURCE)}:{line}: names a feature: {text[:60]!r}"


def docstrings_of(tree: ast.AST) -> Iterator[int]:
    """Yields the ids of bare string statements: docstrings of modules, classes, functions and
    attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)


def names(node: ast.AST, docstrings: set[int]) -> Iterator[str]:
    for field in ("id", "attr", "name", "arg", "module", "asname"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ):
        yield node.value


if __name__ == "__main__":
    sys.exit(main())
