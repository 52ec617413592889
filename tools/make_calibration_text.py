"""Makes the built-in text of `quire quantize`, of this project's own documents and code.

    tools/make_calibration_text.py

The documents come first, without tables of figures, pictures and comments; then the docstrings of
some packages; then the code of others. The same tree makes the same bytes. The text need not follow
each change of a document: checkpoints and records are comparable while it stands.
"""

from __future__ import annotations

import ast
import json
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "quire"
OUT = SOURCE / "compression" / "calibration.jsonl.xz"
LIMIT = 120_000
"""The most bytes of the compressed file."""
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "docs/*.md")
LEFT_OUT = "quantization.md"
"""A document that has figures made with this text."""
CODE = ("cache", "evaluate")
"""Packages whose code is part of the text."""
PROSE = ("engine", "runner", "server")
"""Packages of which only docstrings are."""
GENERATED = re.compile(r"<!-- *(\w+): ?begin *-->.*?<!-- *\1: ?end *-->\n?", re.DOTALL)
"""A block that a script writes from records."""
NOISE = re.compile(r"<!--.*?-->\n?|!\[[^\]]*\]\([^)]*\)\n?", re.DOTALL)
MOSTLY_WORDS = 0.75
"""The least share of letters in a row of a table that is kept."""


def main() -> int:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records()]
    text = "".join(lines).encode("utf-8")
    packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    print(
        f"{OUT.relative_to(ROOT)}: {len(lines)} parts, {len(text)} bytes, {len(packed)} compressed"
    )
    if len(packed) > LIMIT:
        print(f"{LIMIT} bytes are the most")
        return 1
    OUT.write_bytes(packed)
    return 0


def records() -> Iterator[dict[str, str]]:
    """Yields the parts of the text, each with the file that it comes from."""
    for pattern in DOCUMENTS:
        for file in sorted(ROOT.glob(pattern)):
            if file.name != LEFT_OUT:
                yield part(file, prose(file.read_text("utf-8")))
    for package in PROSE:
        for file in sorted(SOURCE.joinpath(package).rglob("*.py")):
            text = docstrings(file.read_text("utf-8"))
            if text:
                yield part(file, text)
    for package in CODE:
        for file in sorted(SOURCE.joinpath(package).rglob("*.py")):
            yield part(file, file.read_text("utf-8"))


def part(file: Path, text: str) -> dict[str, str]:
    return {"source": file.relative_to(ROOT).as_posix(), "text": text}


def prose(document: str) -> str:
    """Returns a Markdown document without what is not worth reading as text."""
    document = NOISE.sub("", GENERATED.sub("", document))
    kept = [line for line in document.splitlines() if not line.startswith("|") or wordy(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n"


def wordy(row: str) -> bool:
    """Whether a row of a table has words rather than figures."""
    shown = [letter for letter in row if not letter.isspace() and letter != "|"]
    return sum(map(str.isalpha, shown)) > MOSTLY_WORDS * len(shown)


def docstrings(code: str) -> str:
    """Returns the docstrings of a module, in its order, a paragraph each."""
    found = [
        (node.body[0].lineno, text)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]
    return "".join(text + "\n\n" for _, text in sorted(found))


if __name__ == "__main__":
    sys.exit(main())
