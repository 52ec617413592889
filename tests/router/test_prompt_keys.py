"""The router's keys of prompts: equal beginnings have equal keys, others do not."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.router.prompts import read_prompt


def prompt(**body: Any) -> tuple[bytes, ...]:
    return read_prompt(json.dumps(body).encode()).keys


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def common(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> int:
    same = [x == y for x, y in zip(a, b, strict=False)]
    assert same == sorted(same, reverse=True)
    return sum(same)


def test_conversations_share_their_common_prefix() -> None:
    first, second = "x" * 3000, "y" * 3000
    one, two = prompt(messages=chat(first)), prompt(messages=chat(first, second))
    assert len(one) == 11
    # They first differ at the end of the array, which is in the last, incomplete piece.
    assert common(one, two) == 11
    assert common(two, prompt(messages=chat(first, "z" * 3000))) >= 11
    assert not common(one, prompt(messages=chat("z" + first)))


def test_other_models_salts_and_tools_share_nothing() -> None:
    text = "x" * 3000
    plain = prompt(prompt=text)
    assert plain
    for other in ({"model": "b"}, {"cache_salt": "s"}, {"tools": [1]}, {"system": "s" * 300}):
        assert not common(plain, prompt(prompt=text, **other))
    assert common(plain, prompt(prompt=text, temperature=0.3, stream=True)) == len(plain)


def test_sizes() -> None:
    assert prompt(prompt="short") == ()
    assert read_prompt(json.dumps({"prompt": "x" * 4000}).encode()).size == 4002
    assert len(prompt(prompt="x" * 2_000_000)) == 1024
    assert not read_prompt(b'{"previous_response_id": null}').continues
    assert read_prompt(b'{"previous_response_id": "resp_1"}').continues


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_any_body_is_read(body: bytes) -> None:
    assert read_prompt(body).size >= 0


def test_deep_bodies_are_read() -> None:
    assert read_prompt(b'{"prompt":' + b"[" * 100_000).size >= 0
