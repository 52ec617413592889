"""Counts the core: the modules that `examples/offline.py` imports on a CPU with no feature on.

The example runs in a process of its own; its `quire` modules are what is counted, except families
that the embedded model's family does not import. A code line is one that holds a token other than
a comment or a docstring.

    tools/core_lines.py                prints the lines of each file, in reading order
    tools/core_lines.py --check 8500   fails above 8500 lines, where a module of OUTSIDE is imported
                                       and where ARCHITECTURE.md has another table
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
    "quire.llm", "quire.engine.core", "quire.engine", "quire.request", "quire.sampling_params",
    "quire.outputs", "quire.config", "quire.errors", "quire.scheduler.scheduler",
    "quire.scheduler", "quire.cache.block_manager", "quire.cache", "quire.plan", "quire.arrays",
    "quire.executor", "quire.runner.model_runner", "quire.runner", "quire.models.decoder",
    "quire.models", "quire.layers", "quire.quantization", "quire.parallel", "quire.sharding",
    "quire.ops", "quire.ops.reference", "quire",
)  # fmt: skip
"""A file stands with the longest of these prefixes that its module has."""
OUTSIDE = (
    "quire.bench", "quire.cli", "quire.disagg", "quire.lora", "quire.offload", "quire.pooling",
    "quire.pooling_params", "quire.server", "quire.speculative", "quire.structured",
    "quire.cache.host_tier", "quire.engine.client", "quire.engine.embedding",
    "quire.engine.framing", "quire.engine.host", "quire.engine.link", "quire.engine.messages",
    "quire.engine.process", "quire.engine.remote_engine", "quire.engine.snapshot",
    "quire.engine.socket_server", "quire.engine.streams", "quire.engine.tiers",
    "quire.engine.trace", "quire.engine.trace_files", "quire.engine.worker_process",
    "quire.models.dummy", "quire.models.kv_scales", "quire.ops.reference.kv8",
    "quire.ops.reference.quantized", "quire.ops.triton", "quire.runner.graphs",
    "quire.runner.mask_ring", "quire.runner.transfer",
)  # fmt: skip
"""Modules and packages that a plain offline run does not need."""
OPEN: frozenset[str] = frozenset()
"""Modules of OUTSIDE that are still imported."""
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
    imported = run_example()
    lines = {name: code_lines(file_of(name)) for name in core(imported)}
    total = sum(lines.values())
    table = markdown(lines, total)
    page = PAGE.read_text("utf-8")
    if options.markdown:
        PAGE.write_text(with_table(page, table), "utf-8")
        return 0
    strangers = sorted(name for name in imported if within(name, OUTSIDE))
    if options.check is None:
        for name, count in lines.items():
            print(f"{count:6} {shown(name)}")
        print(f"{total:6} lines in {len(lines)} files")
        print(f"{sum(code_lines(file_of(name)) for name in strangers):6} of these are outside:")
        for name in strangers:
            print(f"{code_lines(file_of(name)):6} {shown(name)}")
        return 0
    wrong = [f"{shown(name)} is imported without need" for name in strangers if name not in OPEN]
    wrong += [f"{name} can leave OPEN" for name in sorted(OPEN.difference(strangers))]
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


def core(imported: list[str]) -> list[str]:
    """Returns the modules that count, in reading order."""
    used = families_used()
    families = {name for name in imported if file_of(name).parent.name == "families"}
    kept = {name for name in imported if name not in families or file_of(name).stem in used}
    return sorted(kept, key=place)


def place(name: str) -> tuple[int, bool, str]:
    fitting = [prefix for prefix in READING_ORDER if within(name, (prefix,))]
    return READING_ORDER.index(max(fitting, key=len)), name not in fitting, name


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def families_used() -> set[str]:
    """Returns the files, without suffix, that the embedded model's family needs in its folder."""
    folder = SOURCE / "quire" / "models" / "families"
    config = SOURCE / "quire" / "embedded" / "quire-tiny" / "config.json"
    architecture = json.loads(config.read_text("utf-8"))["architectures"][0]
    (first,) = [
        file.stem for file in folder.glob("*.py") if f'"{architecture}"' in file.read_text()
    ]
    used, todo = {"__init__"}, [first]
    while todo:
        stem = todo.pop()
        used.add(stem)
        for node in ast.walk(ast.parse((folder / f"{stem}.py").read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                package, _, rest = node.module.partition("quire.models.families")
                if package == "" and within(node.module, ("quire.models.families",)):
                    names = [rest.strip(".")] if rest else [alias.name for alias in node.names]
                    todo += [name for name in names if name not in used]
    return used


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
