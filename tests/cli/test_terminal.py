"""The recorded terminals: how they are drawn, and the picture of the README."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tools import record_terminal

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "terminal.svg"
SVG = "{http://www.w3.org/2000/svg}"


def test_terminal_rows_are_drawn_while_they_are_visible() -> None:
    first, second = (("$ a & b", "default", False),), (("done", "green", True),)
    drawn = record_terminal.draw([[(0.0, [()]), (2.0, [first]), (4.0, [second])]])
    texts = ElementTree.fromstring(drawn).iter(f"{SVG}text")
    assert ["".join(text.itertext()) for text in texts] == ["$ a & b", "done"]
    # 4 seconds and the last pause, 8 together.
    assert "f0{0%{visibility:hidden}25.000%{visibility:visible}50.000%,100%{visib" in drawn
    assert "f1{0%{visibility:hidden}50.000%{visibility:visible}}" in drawn
    assert drawn.count('class="r e"') == 1


def test_the_picture_is_of_the_session() -> None:
    text = PICTURE.read_text("utf-8")
    assert len(text) < 300_000
    root = ElementTree.fromstring(text)
    rows = ["".join(row.itertext()) for row in root.iter(f"{SVG}text")]
    for _, typed, _ in record_terminal.SESSION:
        assert any(row.endswith(typed) for row in rows), typed
    names = re.findall(r"animation-name:(\w+)", text)
    assert set(names) == set(re.findall(r"@keyframes (\w+)", text))
    assert not re.search(r"href|<script", text)
