"""Fails if modules of `quire` import each other in a circle, and prints every circle.

All imports count, under `TYPE_CHECKING` and inside functions too: what is imported late is needed
all the same. The implicit import of a parent package counts only where it is written out.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = "quire"

Graph = dict[str, set[str]]


def modules(source: Path, package: str) -> dict[str, Path]:
    """Returns every module of the package by its dotted name; a package is its `__init__.py`."""
    found = {}
    for path in sorted((source / package).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Returns the modules in `known` that the module `name` at `path` imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(inner if inner in known else module)
    return (found & known.keys()) - {name}


def circles(graph: Graph) -> list[list[str]]:
    """Returns the strongly connected components of two or more modules (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            component = stack[place:]
            del stack[place:]
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(found)


def shortest(graph: Graph, component: list[str]) -> list[str]:
    """Returns a shortest circle within a component, first module repeated at the end."""
    best: list[str] = []
    for start in component:
        paths, seen = [[start]], {start}
        while paths and not (best and len(paths[0]) + 1 >= len(best)):
            path = paths.pop(0)
            for other in sorted(graph[path[-1]] & set(component)):
                if other == start:
                    best = [*path, start]
                    paths = []
                    break
                if other not in seen:
                    seen.add(other)
                    paths.append([*path, other])
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=SOURCE, help="Folder of the package.")
    parser.add_argument("--package", default=PACKAGE)
    args = parser.parse_args()
    known = modules(args.source, args.package)
    graph = {name: imports(name, path, known) for name, path in known.items()}
    found = circles(graph)
    for component in found:
        print(" -> ".join(shortest(graph, component)))
        if len(component) > 2:
            print(f"    in a group of {len(component)}: {', '.join(component)}")
    if found:
        print(f"{len(found)} import circle(s)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
