"""Records the code and the arguments of each launch, so that two source trees can be compared.

    python -m tests.ops.compile_kernels --record /tmp/old    # in one tree
    python -m tests.ops.compile_kernels --record /tmp/new    # in the other tree
    python -m tests.ops.launch_code /tmp/old /tmp/new        # prints the launches that differ

The code of a launch is its IR behind the front end, after functions were inlined. With `--ptx` it
is PTX, which takes a hundred times as long. Names of kernels, values and parameters do not count,
nor does the order of parameters. All else does: also the grid, compile options, and the number,
shape or dtype that each parameter gets. So equal launches take equal time on a card.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

_PARAMETER = re.compile(r"\b\w+_param_(\d+)\b")
_LOAD = re.compile(r"\s*ld\.param\.(\w+)\s+(%\w+), \[(\w+_param_\d+)\];")
_REGISTER = re.compile(r"%(?:rd|rs|rh|fd|r|f|p|h|b|q)\d+\b")
_SKIPPED = re.compile(r"\s*(\.loc .*|\.file .*|\.reg .*|\.param .*|\$L__tmp\d+:)?$")
_FUNCTION = re.compile(r"\s*tt\.func public @\w+\((.*)\) (attributes .*)")
_ARGUMENT = re.compile(r"(%[\w.$-]+): (.*)")
_CONSTANT = re.compile(r"\s*(%[\w.$-]+) = arith\.constant (.*)")
_VALUE = re.compile(r"%[\w.$-]+")


class Code(NamedTuple):
    """The code of a kernel.

    Attributes:
        text: IR or PTX with canonical names.
        order: index of each parameter that the kernel reads, in the order of their first use.
    """

    text: str
    order: list[int]


def canonical_ir(ir: str) -> Code:
    """Renames values and parameters in the order of their first use, and inserts constants where
    they are used."""
    parameters: dict[str, tuple[int, str]] = {}
    constants: dict[str, str] = {}
    names: dict[str, str] = {}
    order: list[int] = []
    lines = []

    def rename(match: re.Match[str]) -> str:
        name = match.group(0)
        if name in constants:
            return constants[name]
        if name not in names and name in parameters:
            index, kind = parameters[name]
            names[name] = f"%param{len(order)}<{kind}>"
            order.append(index)
        return names.setdefault(name, f"%{len(names)}")

    for line in ir.splitlines():
        if match := _FUNCTION.fullmatch(line):
            listed = re.split(r", (?=%)", match.group(1)) if match.group(1) else []
            for index, argument in enumerate(listed):
                found = _ARGUMENT.fullmatch(argument)
                assert found is not None, argument
                parameters[found.group(1)] = index, found.group(2)
            lines.append(match.group(2))
        elif match := _CONSTANT.fullmatch(line):
            constants[match.group(1)] = f"({match.group(2)})"
        else:
            lines.append(_VALUE.sub(rename, line))
    return Code("\n".join(lines), order)


def canonical_ptx(ptx: str, shared: int) -> Code:
    """Renames registers and parameters in the order of their first use.

    A loaded parameter becomes the name of its register, because the compiler loads parameters in
    the order in which a kernel lists them.

    Args:
        ptx: the output of Triton's compiler.
        shared: bytes of dynamic shared memory of a program, which PTX does not contain.
    """
    loaded: dict[str, str] = {}
    lines = [f"shared memory: {shared}"]
    for full in ptx.splitlines():
        line = full.partition("//")[0].rstrip()
        if match := _LOAD.fullmatch(line):
            kind, register, parameter = match.groups()
            loaded[register] = f"{parameter}.{kind}"
        elif ".visible .entry" in line:
            lines.append("entry")
        elif not _SKIPPED.fullmatch(line):
            lines.append(line)
    names: dict[str, str] = {}
    parameters: dict[str, int] = {}
    kinds: collections.Counter[str] = collections.Counter()

    def rename_parameter(match: re.Match[str]) -> str:
        return f"param{parameters.setdefault(match.group(0), len(parameters))}"

    def rename(match: re.Match[str]) -> str:
        register = match.group(0)
        if register[0] != "%":
            return rename_parameter(match)
        if register in loaded:
            return _PARAMETER.sub(rename_parameter, loaded[register])
        if register not in names:
            kind = register.rstrip("0123456789")
            names[register] = f"{kind}{kinds[kind]}"
            kinds[kind] += 1
        return names[register]

    text = re.sub(f"{_REGISTER.pattern}|{_PARAMETER.pattern}", rename, "\n".join(lines))
    return Code(text, [int(name.rpartition("_")[2]) for name in parameters])


def leaves(value: Any, kind: Any) -> list[str]:
    """Returns descriptions of the numbers and tensors that a launch gives to a kernel.

    Args:
        value: an argument of a kernel.
        kind: its type in the kernel's signature.
    """
    if isinstance(kind, tuple):
        return [part for each in zip(value, kind, strict=True) for part in leaves(*each)]
    if kind == "constexpr":
        return []
    if isinstance(value, Tensor):
        return [f"{value.dtype} {list(value.shape)} {list(value.stride())}"]
    if str(kind).startswith("tensordesc"):
        names = [f"{part}{axis}" for part in ("shape", "stride") for axis in range(value.base.ndim)]
        base = leaves(value.base, "*")[0]
        return [f"descriptor {value.block_shape} of {base} {name}" for name in ("", *names)]
    return [str(value)]


class Recorder:
    """Collects launches by the test that runs them.

    Args:
        folder: receives `launches.json` and the code of each distinct kernel.
        ptx: records PTX instead of IR.
    """

    def __init__(self, folder: Path, *, ptx: bool) -> None:
        self.ptx = ptx
        self._folder = folder
        self._launches: dict[str, list[dict[str, Any]]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, test: str, kernel: str, code: Code, grid: Any, values: list[str]) -> None:
        digest = hashlib.sha256(code.text.encode()).hexdigest()[:16]
        path = self._folder / f"{digest}.txt"
        if not path.exists():
            path.write_text(code.text)
        read = [values[at] for at in code.order if at < len(values)]
        self._launches.setdefault(test, []).append(
            {"kernel": kernel, "code": digest, "grid": list(grid), "values": read}
        )

    def write(self) -> None:
        (self._folder / "launches.json").write_text(json.dumps(self._launches, indent=1))


def compare(old: Path, new: Path) -> int:
    """Prints the launches that differ, one example of each kind, and returns how many do."""
    before, after = (json.loads((each / "launches.json").read_text()) for each in (old, new))
    different: collections.Counter[str] = collections.Counter()
    examples: dict[str, str] = {}
    total = 0
    for test in sorted(before.keys() & after.keys()):
        for own, other in itertools.zip_longest(before[test], after[test], fillvalue={}):
            total += 1
            parts = [
                part for part in ("code", "grid", "values") if own.get(part) != other.get(part)
            ]
            if parts:
                kernels = f"{own.get('kernel')} -> {other.get('kernel')}"
                key = f"{kernels}: {', '.join(parts)}"
                different[key] += 1
                examples.setdefault(key, f"{test}\n    {own}\n    {other}")
    for key, count in different.items():
        sys.stdout.write(f"{key} differ in {count} launches, as in\n    {examples[key]}\n")
    count = sum(different.values())
    sys.stdout.write(f"{total} launches in both trees, {count} differ\n")
    for test in sorted(before.keys() ^ after.keys()):
        sys.stdout.write(f"in one tree only: {test}\n")
    return count


if __name__ == "__main__":
    sys.exit(1 if compare(*map(Path, sys.argv[1:])) else 0)
