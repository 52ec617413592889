"""The interface of a family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Source:
    """Says where a parameter slice lies in a checkpoint.

    transposed: stored as [inputs, outputs]. span: the slice is entries [start, end) of the
    outputs of a tensor that holds more; None: all of it. every: (offset, size, period), the slice
    is outputs offset to offset + size of every `period`; None: all of them.
    """

    name: str
    transposed: bool = False
    span: tuple[int, int] | None = None
    every: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """spec: builds a `ModelSpec` from config.json; raises ModelError.
    source: the checkpoint's place of a parameter slice, by the slice's name.
    prefixes: beginnings of checkpoint names, and what stands for them in `source`: names differ
        with who saved them. The first that fits is replaced.
    ignored: matches checkpoint tensors, by those names, that are not read.
    implements: keys of `unsupported` that its spec reads.
    """

    name: str
    spec: Callable[[Mapping[str, Any]], ModelSpec]
    source: Callable[[ModelSpec, str], Source]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    ignored: re.Pattern[str] | None = None
    head: str = "lm_head.weight"
    implements: tuple[str, ...] = ()

    def canonical(self, name: str) -> str:
        """Returns a checkpoint's name of a tensor as `source` has it."""
        start = next((start for start in self.prefixes if name.startswith(start)), "")
        return self.prefixes.get(start, "") + name.removeprefix(start)
