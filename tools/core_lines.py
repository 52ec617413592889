"""Counts the core: the modules that `examples/offline.py` imports on a CPU with no feature on.

The example runs in a process of its own, and each `quire` module that it has imported at its end is
counted. A code line is one that holds a token other than a comment or a docstring.

    tools/core_lines.py                prints the lines of each file, in reading order
    tools/core_lines.py --check 8500   fails above 8500 lines, and where ARCHITECTURE.md has another
                                       table
    tools/core_lines.py --markdown     writes the table between the markers in ARCHITECTURE.md
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- core: begin -->", "<!-- core: end -->"
READING_ORDER = (
    "quire.llm", "quire.engine.loop.core", "quire.engine", "quire.features.loop_feature",
    "quire.request", "quire.sampling_params", "quire.pooling_params", "quire.outputs",
    "quire.config", "quire.errors", "quire.scheduler.scheduler", "quire.scheduler",
    "quire.cache.block_manager", "quire.cache", "quire.plan", "quire.arrays", "quire.executor",
    "quire.runner.model_runner", "quire.runner", "quire.models.decoder", "quire.models",
    "quire.layers", "quire.quantization", "quire.parallel", "quire.parallel.sharding",
    "quire.ops", "quire.ops.reference", "quire",
)  # fmt: skip
"""A file stands with the longest of these prefixes that its module has."""
NO_CODE = frozenset(
    {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENCODING, tokenize.ENDMARKER,
    }
)  # fmt: skip
RUN = """
import json, runpy, sys
runpy.run_path("examples/offline.py", run_name="__main__")
names = [name for name in sys.modules if name.partition(".")[0] == "quire"]
print("\\n" + json.dumps(names))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", type=int, metavar="LINES")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    lines = {name: code_lines(file_of(name)) for name in sorted(run_example(), key=place)}
    total = sum(lines.values())
    table = markdown(lines, total)
    page = PAGE.read_text("utf-8")
    if options.markdown:
        PAGE.write_text(with_table(page, table), "utf-8")
        return 0
    if options.check is None:
        for name, count in lines.items():
            print(f"{count:6} {shown(name)}")
        print(f"{total:6} lines in {len(lines)} files")
        return 0
    wrong = []
    if total > options.check:
        wrong.append(f"the core has {total} lines of code, more than {options.check}")
    if with_table(page, table) != page:
        wrong.append("ARCHITECTURE.md has another table; run tools/core_lines.py --markdown")
    print("\n".join(wrong) or f"the core has {total} lines of code")
    return 1 if wrong else 0


def run_example() -> list[str]:
    """Returns the names of all `quire` modules that a run of the example leaves imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    env["CUDA_VISIBLE_DEVICES"] = ""
    env["PYTHONPATH"] = str(SOURCE)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def place(name: str) -> tuple[int, bool, str]:
    """Returns where a module stands in the reading order."""
    fitting = [prefix for prefix in READING_ORDER if within(name, (prefix,))]
    return READING_ORDER.index(max(fitting, key=len)), name not in fitting, name


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def file_of(name: str) -> Path:
    path = SOURCE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def shown(name: str) -> str:
    return str(file_of(name).relative_to(SOURCE / "quire"))


def code_lines(file: Path) -> int:
    """Counts lines without blanks, comments and docstrings."""
    text = file.read_text("utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def markdown(lines: dict[str, int], total: int) -> str:
    rows = [f"| `{shown(name)}` | {count} |" for name, count in lines.items() if count]
    head = ["| file | lines of code |", "| --- | ---: |"]
    return "\n".join([*head, *rows, f"| **{len(rows)} files** | **{total}** |"])


def with_table(page: str, table: str) -> str:
    """Returns the page with the table between its markers; raises SystemExit without markers."""
    if BEGIN not in page or END not in page:
        raise SystemExit(f"ARCHITECTURE.md lacks the markers {BEGIN} and {END}")
    between = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(between, lambda _: f"{BEGIN}\n{table}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
