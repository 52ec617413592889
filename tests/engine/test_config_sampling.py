"""SamplingParams refuses invalid values and names the field."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import RequestError
from quire.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 10**400),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0.0),
        ("min_p", float("inf")),
        ("n", 0),
        ("n", 1.0),
        ("max_tokens", 0),
        ("seed", 2**64),
        ("logprobs", 101),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop_token_ids", (-1,)),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_bad_values(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field


def test_stop_may_be_one_text() -> None:
    assert SamplingParams(stop="x").stop == ("x",)  # type: ignore[arg-type]
