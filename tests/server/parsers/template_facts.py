"""Records how public chat templates write the probed call.

Run it as `python -m tests.server.parsers.template_facts FOLDER`.

The folder has the 70 templates that llama.cpp distributes in `models/templates`. Their texts belong
to the models' publishers. So only facts are recorded: a hash, the text that a template writes for
the probed call, and the parsers' hints that it contains. `format` is the template's own format. A
reader of the template decides it, and the script keeps it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from quire.server.parsers.registry import TOOL_PARSERS, reasoning_format, tool_parser
from quire.text.chat_template import ChatTemplate
from quire.text.template_traits import probe

FACTS = Path(__file__).with_name("template_facts.json")
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def facts(source: str) -> dict[str, Any]:
    """Returns what is recorded of a template, and what is picked for it."""
    traits = probe(ChatTemplate(source), SPECIAL_TOKENS)
    hints = [hint for each in TOOL_PARSERS.values() for hint in each.hints if hint in source]
    parser = tool_parser("auto", traits.call, source if traits.shows_tools else "")
    reasoning = reasoning_format("auto", source)
    return {
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
        "shows_tools": traits.shows_tools,
        "call": traits.call,
        "hints": [] if traits.call else hints,
        "reasoning_mark": reasoning and (reasoning.hint or reasoning.close),
        "parser": parser and parser.name,
        "reasoning": reasoning and reasoning.name,
    }


def main() -> None:
    known = json.loads(FACTS.read_text("utf-8")) if FACTS.is_file() else {}
    recorded = {}
    for file in sorted(Path(sys.argv[1]).glob("*.jinja")):
        found = facts(file.read_text("utf-8"))
        before = known.get(file.stem, {})
        recorded[file.stem] = {"format": before.get("format", found["parser"]), **found}
    FACTS.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
