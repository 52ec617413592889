"""The interface of a family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Source:
    """Says where a parameter slice lies in a checkpoint.

    transposed: stored as [inputs, outputs]. span: the slice is entries [start, end) of the
    outputs of a tensor that holds more; None: all of it.
    """

    name: str
    transposed: bool = False
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """spec: builds a `ModelSpec` from config.json; raises ModelError.
    source: the checkpoint's place of a parameter slice, by the slice's name.
    prefix: of checkpoint names, there or not depending on who saved them.
    ignored: matches checkpoint tensors that hold no weights.
    implements: keys of `unsupported` that its spec reads.
    """

    name: str
    spec: Callable[[Mapping[str, Any]], ModelSpec]
    source: Callable[[ModelSpec, str], Source]
    prefix: str = ""
    ignored: re.Pattern[str] | None = None
    head: str = "lm_head.weight"
    implements: tuple[str, ...] = ()
