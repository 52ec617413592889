"""The interface of a family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.models.spec import ModelSpec

if TYPE_CHECKING:
    from quire.models.vision.spec import VisionSpec


@dataclass(frozen=True, slots=True)
class Source:
    """The place of a parameter slice in a checkpoint.

    Attributes:
        name: the tensor's name in the checkpoint.
        transposed: whether the tensor is [inputs, outputs] instead of [outputs, inputs].
        span: [start, end) of the tensor's outputs that belong to the slice, or None for all.
        every: (offset, size, period). In each `period` outputs, the `size` outputs from `offset` on
            belong to the slice. None means all outputs.
    """

    name: str
    transposed: bool = False
    span: tuple[int, int] | None = None
    every: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class VisionHalf:
    """The vision tower of a family's checkpoints.

    Attributes:
        spec: builds a `VisionSpec` from config.json, or raises ModelError.
        source: returns the place in the checkpoint for the name of the tower's parameter slice.
        prefixes: see `Family`. Names of the tower's tensors begin with `visual.`.
    """

    spec: Callable[[Mapping[str, Any]], VisionSpec]
    source: Callable[[VisionSpec, str], Source]
    prefixes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of checkpoint: how to read its config.json and where to find its tensors.

    Attributes:
        name: name of the module.
        spec: builds a `ModelSpec` from config.json, or raises ModelError.
        source: returns the place in the checkpoint for the name of a parameter slice.
        prefixes: maps prefixes of the checkpoint's names to those of canonical names. Programs that
            save checkpoints use different prefixes. The first matching prefix is replaced.
        ignored: matches canonical names of tensors that are not read.
        head: canonical name of the head's weight.
        implements: keys of `unsupported` that `spec` supports.
        vision: the family's vision tower, or None.
    """

    name: str
    spec: Callable[[Mapping[str, Any]], ModelSpec]
    source: Callable[[ModelSpec, str], Source]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    ignored: re.Pattern[str] | None = None
    head: str = "lm_head.weight"
    implements: tuple[str, ...] = ()
    vision: VisionHalf | None = None

    def canonical(self, name: str) -> str:
        """Returns the canonical name, as `source` uses it, of a tensor in a checkpoint."""
        start = next((start for start in self.prefixes if name.startswith(start)), "")
        return self.prefixes.get(start, "") + name.removeprefix(start)
