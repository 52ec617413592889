"""Line breaks between words, in text that arrives piece by piece."""

from __future__ import annotations

from rich.cells import cell_len


class WordWrap:
    """Breaks lines between words, where a terminal would cut words at its edge.

    A word is held back until its end arrives. Characters two columns wide, as in Chinese, are words
    of their own.

    Args:
        width: columns of the terminal; None changes nothing.
    """

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._column = 0
        self._word = ""

    def add(self, text: str) -> str:
        """Returns what can be shown, given the next piece of the text."""
        if self._width is None:
            return text
        shown = []
        for character in text:
            if character == "\n":
                shown.append(self.end() + character)
                self._column = 0
            elif character.isspace():
                shown.append(self.end())
                # At the edge the line break takes the place of the space.
                if self._column < self._width:
                    shown.append(character)
                    self._column += 1
            elif cell_len(character) > 1:
                shown.append(self.end())
                self._word = character
                shown.append(self.end())
            else:
                self._word += character
        return "".join(shown)

    def end(self) -> str:
        """Returns the word that is held back, on a new line if it does not fit on this one."""
        word, self._word = self._word, ""
        if self._width is None or not word:
            return word
        columns = cell_len(word)
        breaks = self._column > 0 and self._column + columns > self._width
        # The terminal cuts a word that is longer than a line.
        self._column = ((0 if breaks else self._column) + columns - 1) % self._width + 1
        return "\n" + word if breaks else word
