"""The table of sampling parameters in `docs/api.md`, from their declarations in `SamplingParams`.

`python tools/parameter_table.py` writes the table into the page. A test compares the two.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from quire.sampling_params import (
    ANTHROPIC,
    OLLAMA,
    OPENAI,
    PARAMETERS,
    RESPONSES,
    DeclaredParameter,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
BEGIN, END = "<!-- sampling:begin -->\n", "<!-- sampling:end -->"
APIS = {OPENAI: "OpenAI", RESPONSES: "Responses", ANTHROPIC: "Anthropic", OLLAMA: "Ollama"}


def main() -> int:
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
    return 0


def with_table(page: str) -> str:
    """Returns the page with today's table between its markers."""
    found = [p for p in PARAMETERS if p.declared.apis]
    rows = sorted(found, key=lambda parameter: -len(parameter.declared.apis))
    header = "| field | default | values | APIs | what it does |\n| --- | --- | --- | --- | --- |\n"
    table = header + "".join(map(_row, rows))
    if BEGIN not in page or END not in page:
        raise SystemExit(f"{PAGE.name} lacks the markers {BEGIN.strip()} and {END}")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}{table}{END}", page, flags=re.DOTALL)


def _row(parameter: DeclaredParameter) -> str:
    apis = ", ".join(APIS[api] for api in parameter.declared.apis)
    cells = f"`{parameter.name}`", _default(parameter), _values(parameter), apis, parameter.text
    return f"| {' | '.join(cells)} |\n"


def _default(parameter: DeclaredParameter) -> str:
    default = parameter.default
    if default is None or default == ():
        return ""
    text = str(default).lower() if parameter.kind is bool else f"{default}"
    return f"the model's, or {text}" if parameter.declared.from_model else text


def _values(parameter: DeclaredParameter) -> str:
    declared = parameter.declared
    if parameter.kind is bool:
        return "true, false"
    if declared.low is None:
        return ", ".join(f"`{word}`" for word in parameter.kind.__args__)
    low, high = _bound(declared.low), _bound(declared.high)
    between = f"above {low}, to {high}" if declared.above_low else f"{low} to {high}"
    return f"up to {declared.entries} of {between}" if declared.entries else between


def _bound(value: float) -> str:
    """Returns a bound as a reader writes it: powers of two that fill an integer type as such."""
    for bits in (31, 63):
        if abs(value) in (2**bits, 2**bits - 1):
            return f"{'-' if value < 0 else ''}2^{bits}{' - 1' if value > 0 else ''}"
    return f"{value:g}"


if __name__ == "__main__":
    sys.exit(main())
