"""The benchmarks' workloads: the requests of a case, and invalid names."""

from __future__ import annotations

import random

import pytest

from quire.errors import ConfigError
from quire.tools.bench.cases import NAMED, check_lengths, check_scale, parse_case, parse_numbers


def test_nano_is_the_community_benchmark() -> None:
    work = NAMED["nano"].workload(151936)
    assert work.sampling == {"temperature": 0.6}
    # These are the known totals of the case.
    assert (len(work.prompts), work.prompt_tokens, work.output_tokens) == (256, 142827, 133966)
    assert all(100 <= len(prompt) <= 1024 for prompt in work.prompts)
    assert all(100 <= length <= 1024 for length in work.lengths)
    # The first draws of `random.Random(0)`: a length in [100, 1024], then ids up to 10000.
    draw = random.Random(0)
    expected = [draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))]
    assert work.prompts[0] == expected


@pytest.mark.parametrize("name", ["b1-256", "3x7x1", "nano"])
def test_lengths_are_those_of_the_workload(name: str) -> None:
    case = parse_case(name)
    work = case.workload(5000)
    assert case.lengths(5000) == ([len(prompt) for prompt in work.prompts], work.lengths)


def test_penalized_nano_differs_only_in_sampling() -> None:
    plain, work = NAMED["nano"].workload(151936), NAMED["nano-penalized"].workload(151936)
    assert (work.prompts, work.lengths) == (plain.prompts, plain.lengths)
    assert work.sampling == {
        "temperature": 0.6,
        "top_k": 50,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    }


@pytest.mark.parametrize(
    ("name", "rows", "input_len", "output_len"),
    [
        ("b1", 1, 128, 512),
        ("b1-256", 1, 128, 256),
        ("b64", 64, 512, 256),
        ("2x81x12", 2, 81, 12),
    ],
)
def test_fixed_sizes(name: str, rows: int, input_len: int, output_len: int) -> None:
    work = parse_case(name).workload(32000)
    assert [len(prompt) for prompt in work.prompts] == [input_len] * rows
    assert work.lengths == [output_len] * rows
    assert work.sampling == {"temperature": 0.0}
    assert min(map(min, work.prompts)) >= 10
    assert max(map(max, work.prompts)) <= 10000


def test_small_vocabularies_and_scales() -> None:
    work = NAMED["b64"].workload(300, scale=0.1)
    assert len(work.prompts) == 6
    assert work.lengths == [26] * 6
    assert max(map(max, work.prompts)) < 300
    assert len(NAMED["b1"].workload(300, scale=0.1).prompts) == 1
    # At a small scale a request of several tokens still decodes, and one of one token gets one.
    assert parse_case("1x9x5").workload(300, scale=0.01).lengths == [2]
    assert parse_case("1x9x1").workload(300).lengths == [1]


@pytest.mark.parametrize("name", ["x", "", "0x1x1", "1x2", "1x2x3x4", "-1x2x3", "b1 "])
def test_unknown_cases(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown case .* expected one of: nano, .*ttft, or ROWSx"
    ):
        parse_case(name)


def test_scales_and_lengths_are_checked() -> None:
    for scale in (0.0, 1.5, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="scale"):
            check_scale(scale)
    cases = [NAMED["ttft"], parse_case("16x8192x128")]
    check_lengths(cases, 8320)
    check_lengths(cases, 4160, scale=0.5)
    with pytest.raises(ConfigError, match=r"16x8192x128 needs sequences of 8320 .* is 8319"):
        check_lengths(cases, 8319)


def test_lists_of_numbers() -> None:
    assert parse_numbers("1, 2,64", "batch_sweep") == [1, 2, 64]
    for bad in ("", "1,,2", "0", "a", "1.5", "²"):
        with pytest.raises(ConfigError, match="batch_sweep takes numbers"):
            parse_numbers(bad, "batch_sweep")
