"""The schedule of one persistent program per multiprocessor that streams a model's layers.

Plain Python: which words programs exchange, which boxes of weights they copy, and what every word
must contain. `streaming_kernels.py` runs it, `streaming_gates.py` times it.

A *word* is a payload with the epoch of its exchange. Every exchange of a run has its own epoch, so
words are never cleared. Two layers in a row use two different buffers. A program sends the words of
layer l + 2 after it has received words of layer l + 1 from the programs that read them in layer l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from shapes import Shape

BOX_BYTES = 16384
LINE_BYTES = 128
"""The width of the swizzle of shared memory."""


@dataclass(frozen=True)
class Exchange:
    """Words that all programs send to each other.

    Attributes:
        words: number of words; every program sends an equal share.
        read: number of words that a program reads. Programs in a row read the same words.
        boxes: boxes of weights that a program consumes behind the exchange.
    """

    words: int
    read: int
    boxes: int = 0


@dataclass(frozen=True)
class Schedule:
    """Layers of exchanges.

    Attributes:
        programs: number of programs.
        layers: number of times that the exchanges are run.
        exchanges: exchanges of a layer. Without words there is none, only boxes.
    """

    programs: int
    layers: int
    exchanges: tuple[Exchange, ...]

    @property
    def text(self) -> str:
        """The exchanges as a kernel's compile-time argument."""
        return " ".join(f"{own.words}:{own.read}:{own.boxes}" for own in self.exchanges)

    @property
    def layer_words(self) -> int:
        """Words of one of the two buffers."""
        return sum(own.words for own in self.exchanges)

    @property
    def epochs(self) -> int:
        """Number of epochs of a run."""
        return self.layers * len(self.exchanges)

    def slot(self, layer: int, exchange: int) -> int:
        """Returns the place of an exchange's first word."""
        before = sum(own.words for own in self.exchanges[:exchange])
        return (layer & 1) * self.layer_words + before

    def epoch(self, base: int, layer: int, exchange: int) -> int:
        return base + layer * len(self.exchanges) + exchange + 1

    def sent(self, program: int, exchange: int) -> range:
        """Returns the words that a program sends."""
        share = self.exchanges[exchange].words // self.programs
        return range(program * share, (program + 1) * share)

    def received(self, program: int, exchange: int) -> range:
        """Returns the words that a program reads."""
        own = self.exchanges[exchange]
        if not own.words:
            return range(0)
        window = program * (own.words // own.read) // self.programs
        return range(window * own.read, (window + 1) * own.read)


def payload(state: NDArray[np.uint32], word: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Returns the 16 bits that a program in some state sends as a word."""
    with np.errstate(over="ignore"):
        mixed = (state + word) * np.uint32(1664525) + np.uint32(1013904223)
    return np.asarray(mixed >> np.uint32(16), np.uint32)


def final_states(schedule: Schedule) -> NDArray[np.uint32]:
    """Returns the state of each program after a run. A program's state is the sum of the payloads
    that it received last, and 0 at first."""
    states = np.zeros(schedule.programs, np.uint32)
    for _ in range(schedule.layers):
        for own in schedule.exchanges:
            if own.words:
                words = np.arange(own.words, dtype=np.uint32)
                sent = payload(states.repeat(own.words // schedule.programs), words)
                sums = sent.reshape(-1, own.read).sum(1, dtype=np.uint32)
                states = sums.repeat(schedule.programs // len(sums))
    return states


@dataclass(frozen=True)
class Boxes:
    """The boxes that a program copies of one kind of a layer's weights.

    The weights of all layers lie in one matrix of int32.

    Attributes:
        rows: rows of the matrix that a program reads in a layer.
        columns: columns of the matrix.
        box: rows and columns of a box.
    """

    rows: int
    columns: int
    box: tuple[int, int]

    @property
    def count(self) -> int:
        return self.rows // self.box[0] * (self.columns // self.box[1])

    @property
    def text(self) -> str:
        """The boxes as a kernel's compile-time argument: the rows of a program, and the numbers of
        boxes down and across."""
        return f"{self.rows}:{self.rows // self.box[0]}:{self.columns // self.box[1]}"


LINES, ROWS = "lines", "rows"


def boxes_of(shape: Shape, programs: int, form: str, size: int) -> tuple[Boxes, ...]:
    """Returns the boxes of the four products of a layer.

    Args:
        form: `lines` for boxes of consecutive memory, which are lines of 128 bytes of a program's
            rows. `rows` for boxes of 8 rows by 1024 inputs in bf16.
        size: bytes of a box in lines.
    """
    found = []
    for outputs, inputs in shape.projections.values():
        own, columns = outputs // programs, inputs // 2
        if form == LINES:
            line = LINE_BYTES // 4
            own, columns, box = own * columns // line, line, (size // LINE_BYTES, line)
        else:
            box = (8, BOX_BYTES // 4 // 8)
        if own % box[0] or columns % box[1]:
            raise ValueError(f"boxes of {box} do not divide {own} rows of {columns} words")
        found.append(Boxes(own, columns, box))
    return tuple(found)


def layer_exchanges(boxes: Sequence[Boxes], words: int = 1024) -> tuple[Exchange, ...]:
    """Returns six exchanges of a layer, in which every program reads all words."""
    qkv, o, gate_up, down = (own.count for own in boxes)
    return tuple(Exchange(words, words, count) for count in (qkv, 0, o, gate_up, down, 0))


def model_exchanges(boxes: Sequence[Boxes]) -> tuple[Exchange, ...]:
    """Returns the exchanges of a layer of Qwen3-0.6B with the words that its values take."""
    qkv, o, gate_up, down = (own.count for own in boxes)
    return (
        Exchange(1024, 1024, qkv),  # x
        Exchange(2048, 256),  # pairs of q, k and v; a program reads one KV head's
        Exchange(8192, 2048, o),  # sums of attention in 4 splits; a program reads 4 heads
        Exchange(4096, 4096, gate_up),  # 4 partial sums of x
        Exchange(2048, 2048, down),  # pairs of activations, rounded up to a power of two
    )
