"""Checks the core, the files to read for `examples/offline.py`: they import only each other.

`CORE` lists them in reading order. A file of the core imports what it needs from `quire` at its
top, and only from files of the core. The rest comes in at the plugin points (`PLUGIN_POINTS`): each
is one function, which imports what a device, a model, a setting or a request asks for. Imports for
type checkers do not count.

    tools/core.py              fails where a file of the core breaks this rule, or a function that
                               is listed imports nothing
    tools/core.py --lines      prints the lines of code of each file
    tools/core.py --markdown   writes them between the markers in ARCHITECTURE.md
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "quire"
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- core: begin -->", "<!-- core: end -->"

CORE = (
    "llm.py",
    "engine/builder.py",
    "engine/loop/core.py",
    "engine/loop/features.py",
    "engine/loop/prompts.py",
    "engine/loop/output.py",
    "engine/loop/beam_search.py",
    "engine/loop/embedding.py",
    "engine/loop/text_scores.py",
    "engine/loop/scoring.py",
    "engine/loop/telemetry.py",
    "engine/loop/terminal.py",
    "engine/loop/trace.py",
    "features/loop_feature.py",
    "features/call.py",
    "features/spec.py",
    "features/registry.py",
    "text/tokenizer.py",
    "text/pieces.py",
    "text/gguf_splitting.py",
    "text/pairs.py",
    "text/tokenizer_files.py",
    "text/sentencepiece.py",
    "text/ends.py",
    "text/detokenizer.py",
    "text/chat_template.py",
    "text/template_traits.py",
    "sampling_params.py",
    "pooling_params.py",
    "outputs.py",
    "config.py",
    "errors.py",
    "system.py",
    "request.py",
    "scheduler/scheduler.py",
    "scheduler/text_scheduler.py",
    "scheduler/step.py",
    "scheduler/lanes.py",
    "scheduler/running.py",
    "input_memory.py",
    "scheduler/delays.py",
    "scheduler/waiting.py",
    "scheduler/order.py",
    "scheduler/admission.py",
    "scheduler/feature.py",
    "scheduler/progress.py",
    "cache/block_manager.py",
    "cache/block_pool.py",
    "cache/block_tables.py",
    "cache/window_blocks.py",
    "cache/state_slots.py",
    "cache/prefix_tree.py",
    "cache/node.py",
    "cache/tree_lanes.py",
    "cache/block_hash.py",
    "cache/sorted_keys.py",
    "plan.py",
    "arrays.py",
    "executor.py",
    "runner/model_runner.py",
    "runner/loaded_model.py",
    "runner/sized_model.py",
    "runner/step_runner.py",
    "runner/program.py",
    "runner/state.py",
    "runner/readback.py",
    "runner/transfer/place.py",
    "runner/kv_cache.py",
    "runner/releasable.py",
    "runner/pinned_memory.py",
    "runner/memory.py",
    "runner/graphs.py",
    "runner/hooks/hook.py",
    "runner/hooks/penalties.py",
    "runner/hooks/sampling.py",
    "runner/hooks/acceptance.py",
    "runner/hooks/logprobs.py",
    "runner/hooks/prompt_logprobs.py",
    "models/config.py",
    "models/spec.py",
    "models/families/family.py",
    "models/families/settings.py",
    "models/families/text_config.py",
    "models/families/rope.py",
    "models/families/llama.py",
    "models/families/qwen3.py",
    "models/families/unsupported.py",
    "models/decoder.py",
    "models/encoder.py",
    "models/general_block.py",
    "models/files.py",
    "models/weights.py",
    "models/dummy.py",
    "models/kv_scales.py",
    "models/memory_errors.py",
    "models/prepack.py",
    "models/quantization.py",
    "models/sanity.py",
    "layers/attention.py",
    "layers/batch.py",
    "layers/build.py",
    "layers/split_groups.py",
    "layers/embedding.py",
    "layers/expert_weights.py",
    "layers/fixed_sums.py",
    "layers/layout.py",
    "layers/linear.py",
    "layers/mlp.py",
    "layers/norm.py",
    "layers/parameter_slice.py",
    "layers/residual.py",
    "layers/rotary.py",
    "quantization/",
    "parallel/group.py",
    "layers/async_tp.py",
    "parallel/sharding.py",
    "parallel/torch_group.py",
    "ops/arguments.py",
    "ops/branch.py",
    "ops/choose.py",
    "ops/experts.py",
    "ops/kv.py",
    "ops/launches.py",
    "ops/rows.py",
    "ops/segments.py",
    "ops/weight.py",
    "ops/reference/attention.py",
    "ops/reference/cache.py",
    "ops/reference/dense.py",
    "ops/reference/experts.py",
    "ops/reference/kv8.py",
    "ops/reference/latent.py",
    "ops/reference/prepacked.py",
    "ops/reference/quantized.py",
    "ops/reference/random.py",
    "ops/reference/segments.py",
    "ops/reference/step.py",
    "ops/reference/truncate.py",
    "ops/fixed/",
    "version.py",
)
"""Files, and packages with all that they hold, in reading order. `__init__.py` of a package that
holds any of them is part of the core."""

PLUGIN_POINTS = {
    "__init__.py:__getattr__": "public names: `import quire` loads neither torch nor the engine",
    "engine/builder.py": "settings: it puts an engine together from the parts that they ask for",
    "engine/loop/core.py:stats": "features: each has its part of the statistics",
    "engine/loop/embedding.py": "features: the second text of a pair is a field of one",
    "config.py:_engine_args": "features: their settings are settings of an engine",
    "features/spec.py:resolve": "features: a part is a module:name string",
    "models/config.py:family_named": "families",
    "ops/choose.py:implementation": "the device's ops",
    "ops/launches.py:compiling": "the device's ops: kernels are compiled before graphs",
    "models/config.py": "weight formats: GGUF",
    "models/files.py": "weight formats: GGUF",
    "models/quantization.py": "weight formats: GGUF",
    "runner/loaded_model.py:_log_missing_kernels": "the device's ops: what Triton lacks",
    "runner/graphs.py:_tune": "the device's ops: the fastest tiles are measured",
}
"""By function (or a whole file), what comes in there."""

LATE: dict[str, str] = {}
"""Imports of the core inside functions of the core, and why they are not at the top."""

NO_CODE = frozenset(
    {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENCODING, tokenize.ENDMARKER,
    }
)  # fmt: skip


class Import(NamedTuple):
    """An import of `quire` in a file.

    Attributes:
        module: the module that is imported, or "?" for `importlib.import_module`.
        function: the function that it stands in, or "" at the top of the file.
        line: its line in the file.
    """

    module: str
    function: str
    line: int


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    files = core_files(SOURCE)
    if options.lines or options.markdown:
        lines = {shown(file): code_lines(file) for file in files}
        if options.markdown:
            page = with_table(PAGE.read_text("utf-8"), markdown(lines))
            PAGE.write_text(page, "utf-8")
        else:
            for name, count in lines.items():
                print(f"{count:6} {name}")
            print(f"{sum(lines.values()):6} lines of code in {len(lines)} files")
        return 0
    found = [each for file in files for each in breaches(file, set(files))]
    found += [f"{point} imports nothing late; remove it from the list" for point in stale(files)]
    print("\n".join(found) or f"the core's {len(files)} files import only each other")
    return 1 if found else 0


def stale(files: list[Path], source: Path = SOURCE) -> list[str]:
    """Returns the listed functions that have no import of `quire`."""
    late = {
        f"{file.relative_to(source)}:{each.function}"
        for file in files
        for each in imports(file, source)
    }
    return [point for point in (*PLUGIN_POINTS, *LATE) if ":" in point and point not in late]


def core_files(source: Path) -> list[Path]:
    """Returns the files that `CORE` lists, in its order."""
    files: dict[Path, None] = {}
    for entry in CORE:
        if entry.endswith("/"):
            listed = sorted((source / entry).rglob("*.py"))
        else:
            listed = sorted(source.glob(entry))
        if not listed:
            raise SystemExit(f"tools/core.py lists {entry}, which is not in {source}")
        files |= dict.fromkeys(listed)
    for file in list(files):
        for folder in file.relative_to(source).parents:
            files[source / folder / "__init__.py"] = None
    return list(files)


def breaches(file: Path, core: set[Path], source: Path = SOURCE) -> Iterator[str]:
    """Yields a line for each import that the rule forbids."""
    name = str(file.relative_to(source))
    for each in imports(file, source):
        point = f"{name}:{each.function}"
        if name in PLUGIN_POINTS or (each.function and point in PLUGIN_POINTS):
            continue
        inside = module_file(each.module, source) in core
        where = f"{name}:{each.line}: {each.module}"
        if not inside:
            yield f"{where} is outside the core; list it, or import it at a plugin point"
        elif each.function and point not in LATE:
            yield f"{where} is imported in {each.function}(); import it at the top of the file"


def imports(file: Path, source: Path = SOURCE) -> list[Import]:
    """Returns a file's imports of `quire`, except those for type checkers."""
    found: list[Import] = []

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                for other in child.orelse:
                    visit(other, getattr(other, "name", function))
                continue
            line = getattr(child, "lineno", 0)
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                names = [submodule(child.module or "", each.name, source) for each in child.names]
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
                names = ["quire.?"]
            else:
                names = []
            found.extend(
                Import(module.replace("quire.?", "?"), function, line)
                for module in names
                if module.split(".")[0] == "quire"
            )
            inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            visit(child, getattr(child, "name", "") if inner else function)

    visit(ast.parse(file.read_text("utf-8")), "")
    return found


def submodule(module: str, name: str, source: Path) -> str:
    """Returns `module.name` if that is a module, else `module`."""
    inner = f"{module}.{name}"
    return inner if module_file(inner, source).exists() else module


def module_file(module: str, source: Path) -> Path:
    path = source.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def shown(file: Path) -> str:
    return str(file.relative_to(SOURCE))


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


def markdown(lines: dict[str, int]) -> str:
    """Returns a table of folders, with the number of the core's files and of their lines."""
    folders: dict[str, list[int]] = {}
    for name, count in lines.items():
        folders.setdefault(str(Path(name).parent), []).append(count)
    names = {folder: f"`{folder}/`" for folder in folders} | {".": "files at the top"}
    table = [f"| {names[f]} | {len(counts)} | {sum(counts)} |" for f, counts in folders.items()]
    head = ["| folder | files | lines of code |", "| --- | ---: | ---: |"]
    total = sum(lines.values())
    return "\n".join([*head, *table, f"| **all** | **{len(lines)}** | **{total}** |"])


def with_table(page: str, table: str) -> str:
    """Returns the page with the table between its markers; raises SystemExit without markers."""
    if BEGIN not in page or END not in page:
        raise SystemExit(f"ARCHITECTURE.md lacks the markers {BEGIN} and {END}")
    between = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(between, lambda _: f"{BEGIN}\n{table}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
