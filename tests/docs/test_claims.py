"""Numbers in the pages equal those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from quire.features.loop_feature import LoopFeature
from quire.runner.hooks.hook import GateHook, Hook, HostHook, ProgramHook
from quire.scheduler.feature import Feature
from quire.server.http.bodies import MAX_MEMBERS, MAX_STRINGS, MAX_VALUES

ROOT = Path(__file__).resolve().parents[2]


def test_interfaces_of_features() -> None:
    methods = [
        name
        for interface in (Feature, LoopFeature, Hook, ProgramHook, HostHook, GateHook)
        for name, value in vars(interface).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    ]
    text = " ".join((ROOT / "docs" / "design-decisions.md").read_text("utf-8").split())
    assert "three interfaces" in text
    assert f"{len(methods)} methods in all" in text


def test_limits_of_values_in_a_body() -> None:
    text = (ROOT / "docs" / "operations.md").read_text("utf-8")
    (row,) = re.findall(r"^\| values in a body \| (.*?) \|", text, re.MULTILINE)
    counts = [f"{most:,}".replace(",", " ") for most in (MAX_MEMBERS, MAX_STRINGS, MAX_VALUES)]
    kinds = "lists, objects and members", "strings", "values"
    assert row == "; ".join(f"{n} {kind}" for n, kind in zip(counts, kinds, strict=True))
