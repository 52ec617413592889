"""Records a server and a chat with it, and draws both terminals as an animated SVG.

    pip install pyte && python tools/record_terminal.py docs/images/terminal.svg

Runs the commands of `SESSION` at the root of the repository, where `make serve` has run before. The
embedded model answers greedily, so every recording has the same texts. Pauses are cut to
`LONGEST_PAUSE`. Viewers that show no animation show its end.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 84
SHELL = ["/bin/sh", "-i"]
SERVER, CHAT = 0, 1
ROWS = (9, 16)
"""Heights of the server's terminal and of the chat's, in characters."""
SESSION = (
    (SERVER, "make serve", "-d '"),
    (CHAT, ".venv/bin/quire chat --url localhost:8000 --temperature 0", "› "),
    (CHAT, "My name is Anna.", "› "),
    (CHAT, "Tell me a story about a fox.", "› "),
    (CHAT, "What is my name?", "› "),
)
"""(terminal, what is typed, what shows that it is done)."""
LONGEST_PAUSE = 0.25
"""Seconds."""
LAST_PAUSE = 4.0
"""Seconds for which the end is shown."""
WIDTH, HEIGHT, MARGIN = 8, 18, 12
"""Pixels of a character, and around each terminal."""
COLORS = {"default": "#d8dee9", "cyan": "#79c0ff", "green": "#7ee787", "red": "#ff7b72"}

Row = tuple[tuple[str, str, bool], ...]
"""Runs of characters: text, color, bold."""


@dataclass
class Terminal:
    """A shell behind a terminal, and what its screen has shown.

    shown: (second, rows) after each change.
    """

    rows: int
    shown: list[tuple[float, list[Row]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Drawing needs none.
        import pyte

        self.screen = pyte.Screen(COLUMNS, self.rows)
        self.stream = pyte.ByteStream(self.screen)
        self.process, self.file = pty.fork()
        if self.process == 0:
            settings = {"PS1": "$ ", "TERM": "xterm", "COLUMNS": str(COLUMNS), "ENV": ""}
            os.chdir(ROOT)
            os.execve(SHELL[0], SHELL, {**os.environ, **settings})
        size = struct.pack("HHHH", self.rows, COLUMNS, 0, 0)
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, size)

    def text(self) -> str:
        """Returns the text up to the cursor."""
        cursor = self.screen.cursor
        above = [line.rstrip() for line in self.screen.display[: cursor.y]]
        return "\n".join([*above, self.screen.display[cursor.y][: cursor.x]])

    def close(self) -> None:
        """Ends what runs in the shell, and the shell."""
        for key in (b"\x03", b"\x04", b"\x04"):
            os.write(self.file, key)
            time.sleep(0.5)
        os.waitpid(self.process, 0)
        os.close(self.file)


def record() -> list[list[tuple[float, list[Row]]]]:
    """Types the session, and returns what each terminal has shown.

    Raises:
        TimeoutError: something did not come within two minutes.
    """
    terminals = [Terminal(rows) for rows in ROWS]
    clock = _Clock()
    try:
        for terminal in terminals:
            _until(terminals, clock, terminal, "$ ")
        for index, text, done in SESSION:
            for letter in text:
                os.write(terminals[index].file, letter.encode())
                _read(terminals, clock, 0.04)
            _read(terminals, clock, 0.3)
            before = terminals[index].text()
            os.write(terminals[index].file, b"\n")
            _until(terminals, clock, terminals[index], done, before)
    finally:
        for terminal in terminals:
            terminal.close()
    return [terminal.shown for terminal in terminals]


class _Clock:
    """Seconds in which something was shown; longer pauses count as `LONGEST_PAUSE`."""

    def __init__(self) -> None:
        self.now, self._last = 0.0, time.monotonic()

    def tick(self) -> float:
        """Returns the second of what is shown now."""
        now = time.monotonic()
        self.now += min(now - self._last, LONGEST_PAUSE)
        self._last = now
        return self.now


def _read(terminals: list[Terminal], clock: _Clock, seconds: float) -> None:
    """Takes what the terminals print within some time."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([terminal.file for terminal in terminals], [], [], left)
        for terminal in terminals:
            if terminal.file in ready:
                terminal.stream.feed(os.read(terminal.file, 65536))
                rows = [_row(terminal.screen, line) for line in range(terminal.rows)]
                if not terminal.shown or rows != terminal.shown[-1][1]:
                    terminal.shown.append((clock.tick(), rows))


def _until(
    terminals: list[Terminal], clock: _Clock, terminal: Terminal, end: str, before: str = ""
) -> None:
    """Waits until a terminal's text ends so, or holds it, and is not what it was before."""
    for _ in range(1200):
        _read(terminals, clock, 0.1)
        text = terminal.text()
        if text != before and (text.endswith(end) or (end == "-d '" and end in text)):
            return
    raise TimeoutError(f"waited for {end!r}:\n{terminal.text()}")


def _row(screen: Any, line: int) -> Row:
    cells = [screen.buffer[line][column] for column in range(COLUMNS)]
    while cells and cells[-1].data == " ":
        cells.pop()
    runs: list[tuple[str, str, bool]] = []
    for cell in cells:
        color = cell.fg if cell.fg in COLORS else "default"
        if runs and runs[-1][1:] == (color, cell.bold):
            runs[-1] = (runs[-1][0] + cell.data, color, cell.bold)
        else:
            runs.append((cell.data, color, cell.bold))
    return tuple(runs)


def draw(shown: list[list[tuple[float, list[Row]]]]) -> str:
    """Returns an SVG in which each row appears and goes as it did.

    shown: of each terminal, (second, rows) after each change.
    """
    length = max(frames[-1][0] for frames in shown) + LAST_PAUSE
    width = COLUMNS * WIDTH + 2 * MARGIN
    top, parts, styles = 0, [], []
    for frames in shown:
        rows = len(frames[0][1])
        height = rows * HEIGHT + 2 * MARGIN
        parts.append(f'<rect y="{top}" width="{width}" height="{height}" rx="8" fill="#161b22"/>')
        for line in range(rows):
            y = top + MARGIN + line * HEIGHT + 13
            for start, end, row in _times(frames, line):
                name = f"f{len(styles)}"
                styles.append(_keyframes(name, start / length, end and end / length))
                kind = "r" if end else "r e"
                shows = f'class="{kind}" style="animation-name:{name}"'
                parts.append(f'<text {shows} y="{y}">{_runs(row)}</text>')
        top += height + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top - MARGIN}" '
        f'width="{width}" height="{top - MARGIN}" role="img">\n'
        "<title>make serve starts a server, and quire chat talks to it</title>\n<style>\n"
        "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "white-space:pre}\n"
        f".r{{visibility:hidden;animation:{length:.2f}s step-end infinite}}"
        ".e{visibility:visible}\n"
        "@media (prefers-reduced-motion:reduce){.r{animation:none}}\n"
    )
    return head + "\n".join(styles) + "\n</style>\n" + "\n".join(parts) + "\n</svg>\n"


def _times(
    frames: list[tuple[float, list[Row]]], line: int
) -> Iterator[tuple[float, float | None, Row]]:
    """Yields from when to when a row showed what; None: to the end. Empty rows are left out."""
    start, row = frames[0][0], frames[0][1][line]
    for second, rows in frames[1:]:
        if rows[line] != row:
            if row:
                yield start, second, row
            start, row = second, rows[line]
    if row:
        yield start, None, row


def _keyframes(name: str, start: float, end: float | None) -> str:
    gone = "" if end is None else f"{end:.3%},100%{{visibility:hidden}}"
    return f"@keyframes {name}{{0%{{visibility:hidden}}{start:.3%}{{visibility:visible}}{gone}}}"


def _runs(row: Row) -> str:
    """Returns the spans of a row. Each has its place, whatever the width of the viewer's font."""
    spans, column = [], 0
    for text, color, bold in row:
        weight = ' font-weight="bold"' if bold else ""
        spans.append(
            f'<tspan x="{MARGIN + column * WIDTH}" textLength="{len(text) * WIDTH}" '
            f'fill="{COLORS[color]}"{weight}>{escape(text)}</tspan>'
        )
        column += len(text)
    return "".join(spans)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(record()), "utf-8")
