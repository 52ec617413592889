"""Engines of tests with images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM


@pytest.fixture
def llms() -> Iterator[Any]:
    """Makes engines, which end with the test."""
    made: list[LLM] = []

    def make(folder: Path, **settings: Any) -> LLM:
        usual = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "image_cache_gb": 0.01}
        made.append(LLM(str(folder), **(usual | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
