"""Folders of one model with several weights, and what each of them answers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.arrays import int32
from quire.engine.loop.core import EngineCore
from quire.request import Request
from quire.sampling_params import SamplingParams
from tests.models.checkpoints import make

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


class Models:
    """A model with `count` different weights.

    Attributes:
        folders: a folder for each of the weights.
    """

    def __init__(self, folder: Path, count: int = 3, case: str = "llama") -> None:
        self.folders = [folder / str(index) for index in range(count)]
        self._oracles = [make(self.folders[0], case)]
        for index, other in enumerate(self.folders[1:], 1):
            shutil.copytree(self.folders[0], other)
            for file in other.glob("*.safetensors"):
                save_file(_rolled(load_file(file), index), file)
            self._oracles.append(type(self._oracles[0]).from_pretrained(other).eval())

    def tensors(self, index: int) -> dict[str, Tensor]:
        files = sorted(self.folders[index].glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    @torch.inference_mode()
    def choices(self, index: int, tokens: Sequence[int]) -> list[int]:
        """Returns the greedy next token behind each token of a text."""
        found: list[int] = (
            self._oracles[index](torch.tensor([list(tokens)])).logits[0].argmax(1).tolist()
        )
        return found

    def check(self, request: Request, weights: Sequence[int]) -> None:
        """Asserts that each token of a finished request is the greedy choice of the weights that
        its version names.

        Args:
            weights: index of the weights, by version.
        """
        at = request.prompt_len
        for number, count in request.version_runs:
            text = request.tokens.view().tolist()
            wanted = self.choices(weights[number], text)
            assert text[at : at + count] == wanted[at - 1 : at - 1 + count], (number, at)
            at += count
        assert at == request.known


def _rolled(tensors: dict[str, Tensor], by: int) -> dict[str, Tensor]:
    return {name: tensor.roll(7 * by, 0).contiguous() for name, tensor in tensors.items()}


def start(core: EngineCore, name: str, prompt: list[int], params: SamplingParams) -> Request:
    (request,) = core.add(name, int32(prompt), params, max_total=len(prompt) + params.max_tokens)
    return request


def run(core: EngineCore, until: Any) -> None:
    """Steps until a condition holds."""
    for _ in range(20000):
        if until():
            return
        core.step()
    raise AssertionError("it never ended")
