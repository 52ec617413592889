"""Two ranks with tensor parallelism give the tokens of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from quire.models import build_model, load_config, load_weights, spec_from_config
from quire.models.kv_scales import head_scales
from quire.parallel import ProcessGroup, SingleGroup
from quire.parallel.sharding import ShardSpec
from tests.gloo_ranks import on_ranks
from tests.models import checkpoints
from tests.models.checkpoints import make
from tests.models.harness import Harness
from tests.slow import some

PROMPTS = [[5, 17, 99, 3, 42, 7, 7, 150, 23], [11]]
CASES = ["qwen3-tied-bias", "llama-mqa-tied", "gpt2", "qwen3-window"]
"""Two KV heads over two ranks, one KV head that both hold, LayerNorm and biases, two KV groups; a
vocabulary that does not divide evenly in all of them. The first two also with 8-bit KV, where each
rank has the scales of its own heads."""
VARIANTS = [
    "cohere2-bias", "deepseek-v3", "exaone4", "gemma2", "gemma3-linear", "gemma4-moe", "glm",
    "glm4", "granite", "ministral", "ministral3", "olmo2", "olmo2-mqa", "olmo3", "phi3",
    "phi3-short", "qwen3-next", "qwen3.5", "seed-oss", "smollm3-window",
]  # fmt: skip
"""Cases that test more than their family's first one."""


def _further() -> list[str]:
    """Returns the variants, and the first case of each family that has none here."""
    found = {checkpoints.CASES[case][0]: case for case in (*CASES, *VARIANTS)}
    first = {family: case for case, (family, _) in reversed(checkpoints.CASES.items())}
    return [*VARIANTS, *(case for family, case in first.items() if family not in found)]


FURTHER = _further()
"""A checkpoint of each other family."""


def tokens_of(
    folder: Path, load_format: str, group: ProcessGroup, kv_cache_dtype: str = "auto"
) -> list[list[int]]:
    spec = spec_from_config(load_config(folder))
    model = build_model(spec, device="cpu", dtype=torch.float32, group=group)
    load_weights(model, folder, load_format)
    scales = None
    if kv_cache_dtype == "fp8_e4m3":
        scales = head_scales(model, folder, load_format)
    harness = Harness(model, kv_cache_dtype=kv_cache_dtype, head_scales=scales)
    return harness.generate(PROMPTS, 24 if folder.name in CASES else 8, chunk=5)


def all_tokens(folders: list[Path], group: ProcessGroup) -> list[list[list[int]]]:
    found = [tokens_of(folder, "auto", group) for folder in folders]
    found.append(tokens_of(folders[0], "dummy", group))
    for kind in ("fp8_e4m3", "fp8_dynamic", "int8"):
        found += [tokens_of(folder, "auto", group, kind) for folder in folders[:2]]
    return found


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    folders = [tmp_path / case for case in (*CASES, *some(FURTHER))]
    for folder in folders:
        make(folder, folder.name)
    expected = all_tokens(folders, SingleGroup())

    found = on_ranks(all_tokens, folders, tmp_path)
    assert found == [expected, expected]


class Ranked(SingleGroup):
    """A group that only reports its size, to build one rank's part of a model."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world


def test_heads_that_do_not_divide_over_ranks(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    spec = spec_from_config(load_config(tmp_path))
    with pytest.raises(ConfigError, match="6 attention heads"):
        build_model(spec, device="meta", group=Ranked(0, 4))


def test_a_width_that_does_not_divide_over_ranks(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    spec = spec_from_config({**load_config(tmp_path), "intermediate_size": 171})
    with pytest.raises(ConfigError) as told:
        build_model(spec, device="meta", group=Ranked(0, 2))
    assert told.value.param == "tensor_parallel_size"
    assert str(told.value) == (
        "layers.0.mlp.up.gate, outputs: 171 cannot be split evenly over 2 ranks; "
        "tensor_parallel_size may be 1, 3, 9, 19, 57"
    )


def test_each_rank_books_only_its_heads(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    spec = spec_from_config(load_config(tmp_path))
    whole = build_model(spec, device="meta").kv_groups(16)[0].block_bytes
    half = build_model(spec, device="meta", group=Ranked(1, 2)).kv_groups(16)[0].block_bytes
    assert half * 2 == whole


def test_padded_shards() -> None:
    shard = ShardSpec(0, padded=True)
    assert [shard.bounds(5, rank, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
