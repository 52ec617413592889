"""Applies docs/adding-a-model.md: its code makes a family that passes the oracle."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from quire.models import config
from tests.models.checkpoints import CASES
from tests.models.test_families import test_logits_and_greedy_tokens as ask_the_oracle

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("case", ["starcoder2-untied", "starcoder2-window"])
def test_from_nothing_to_a_passing_oracle(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, cases = blocks("python")
    (table,) = blocks("json")
    for architecture, name in json.loads(table).items():
        monkeypatch.setitem(config.ARCHITECTURES, architecture, name)
        module = types.ModuleType(f"quire.models.families.{name}")
        exec(compile(family, str(PAGE), "exec"), module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    made: dict[str, Any] = {}
    exec(cases, made)
    monkeypatch.setitem(CASES, case, made["CASES"][case])
    ask_the_oracle(case, tmp_path)


def test_files_and_names_on_the_page_exist() -> None:
    root = PAGE.parents[1]
    text = PAGE.read_text()
    for name in re.findall(r"`((?:src|tests|layers|models|families)/[\w/]+\.\w+)`", text):
        places = (root / name, root / "src" / "quire" / name, root / "src/quire/models" / name)
        known = any(place.exists() for place in places)
        assert known or name == "src/quire/models/families/starcoder2.py", name
    for word in ("VARIANTS", "DEFAULTS", "HALF"):
        found = (path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
        assert any(f"\n{word} = " in code or f"\n{word}: " in code for code in found), word
