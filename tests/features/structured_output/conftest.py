"""The embedded model's tokenizer, and a way to try documents token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.features.structured_output.compiler import Compiler
from quire.sampling_params import StructuredOutputsParams
from quire.text.tokenizer import Tokenizer

FOLDER = Path(quire.__file__).parent / "embedded" / "quire-tiny"
EOS = (6139, 6137)

Accepts = Callable[[StructuredOutputsParams, str], bool]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_path(FOLDER)


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> Iterator[Compiler]:
    made = Compiler(tokenizer.hub.to_str, tokenizer.vocab_size, EOS)
    yield made
    made.shutdown()


@pytest.fixture(scope="session")
def accepts(compiler: Compiler, tokenizer: Tokenizer) -> Accepts:
    """Returns whether the masks allow every token of a text, and then its end."""

    def accept(params: StructuredOutputsParams, text: str) -> bool:
        matcher = compiler.compile(params).result().deep_copy()
        for token in tokenizer.encode(text, add_special_tokens=False).tolist():
            mask = matcher.compute_bitmask()
            if not mask[token >> 3] >> (token & 7) & 1:
                return False
            matcher.consume_token(token)
        end = matcher.compute_bitmask()
        return bool(end[EOS[0] >> 3] >> (EOS[0] & 7) & 1)

    return accept


def of_schema(schema: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=json.dumps(schema))
