"""Numbers and flags in the README equal those of the code."""

from __future__ import annotations

import json
import re

from quire.cli.settings import settings_of
from quire.config import EngineArgs
from quire.server.args import ServerArgs
from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def test_architectures() -> None:
    names = json.loads((ROOT / "src/quire/models/families/architectures.json").read_text())
    assert f"[{len(names)} architectures](docs/models.md)" in README


def test_settings() -> None:
    section = README.partition("## Settings")[2].partition("\n## ")[0]
    flags = set(re.findall(r"--([a-z][a-z-]+)", section)) - {"config", "help", "help-all"}
    known = {each.name for schema in (EngineArgs, ServerArgs) for each in settings_of(schema)}
    assert len(flags) > 20
    assert {flag.removeprefix("no-").replace("-", "_") for flag in flags} <= known
