"""Makes the built-in text of `quire quantize`, of this project's own documents and code, and of
stories that the embedded model writes.

    tools/make_calibration_text.py [--stories]

The documents come first, without tables of figures, pictures and comments; then the docstrings of
some packages; then the code of others; then the stories, a quarter of the text, which are those of
the last time unless `--stories` asks for new ones. The same tree makes the same bytes, but for new
stories, which may be others on another processor. The text need not follow each change of a
document: checkpoints and records are comparable while it stands.
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from quire import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "quire"
OUT = SOURCE / "tools" / "quantize" / "calibration.jsonl.xz"
LIMIT = 160_000
"""The most bytes of the compressed file."""
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "docs/*.md")
LONGEST = 8000
"""The most characters of a document: its beginning, to the end of a paragraph."""
LEFT_OUT = "quantization.md"
"""A document that has figures made with this text."""
CODE = ("cache", "evaluate")
"""Packages whose code is part of the text."""
PROSE = ("engine", "runner", "server")
"""Packages of which only docstrings are."""
GENERATED = re.compile(r"<!-- *(\w+): ?begin *-->.*?<!-- *\1: ?end *-->\n?", re.DOTALL)
"""A block that a script writes from records."""
NOISE = re.compile(r"<!--.*?-->\n?|!\[[^\]]*\]\([^)]*\)\n?", re.DOTALL)
STORIES = "src/quire/embedded/quire-tiny"
"""The folder of the model that writes the stories."""
OPENINGS = (
    "Once upon a time",
    "One day,",
    "There was once",
    "In a small town",
    "Long ago,",
    "Every morning",
    "It was a sunny day",
    "A little",
)
STORY_COUNT, STORY_TOKENS = 184, 200
MOSTLY_WORDS = 0.75
"""The least share of letters in a row of a table that is kept."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the built-in text of `quire quantize`.")
    parser.add_argument("--stories", action="store_true", help="have stories written anew")
    told = new_stories() if parser.parse_args().stories else known_stories()
    found = [*records(), {"source": STORIES, "text": told}]
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in found]
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
    """Yields the parts of the text that are files, each with its name."""
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


def known_stories() -> str:
    """Returns the stories that the text has."""
    parts = map(json.loads, lzma.decompress(OUT.read_bytes()).splitlines())
    return "".join(part["text"] for part in parts if part["source"] == STORIES)


def new_stories() -> str:
    """Returns stories by the embedded model, a paragraph or more each."""
    prompts = [OPENINGS[index % len(OPENINGS)] for index in range(STORY_COUNT)]
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=STORY_TOKENS)
        for seed in range(STORY_COUNT)
    ]
    llm = LLM(device="cpu")
    told = llm.generate(prompts, params, use_tqdm=False)
    llm.shutdown()
    stories = zip(prompts, told, strict=True)
    return "\n\n".join((start + end.outputs[0].text).strip() for start, end in stories) + "\n"


def part(file: Path, text: str) -> dict[str, str]:
    return {"source": file.relative_to(ROOT).as_posix(), "text": text}


def prose(document: str) -> str:
    """Returns the beginning of a Markdown document without what is not worth reading as text."""
    document = NOISE.sub("", GENERATED.sub("", document))
    kept = [line for line in document.splitlines() if not line.startswith("|") or wordy(line)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    if len(text) > LONGEST:
        text = text[: text.rindex("\n\n", 0, LONGEST)]
    return text + "\n"


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
