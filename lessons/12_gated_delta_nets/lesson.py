"""A memory of fixed size in place of keys and values: the gated delta rule, and what serves it.

    python -m lessons 12 [--mine FILE]
    python -m lessons 12 --model Qwen/Qwen3.5-27B  # its bytes

1. The rule as a memory that is written and overwritten; without the delta it blurs.
2. A prompt a token at a time and in chunks of 64: the same state, 64 times fewer steps.
3. Bytes of a request by its length: a state, and keys and values.
4. A small trained hybrid on Quire and on your engine: prompts in chunks, and from checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lessons import mine
from lessons.common import Loaded, check, load, parser, table
from quire import LLM, SamplingParams
from quire.arrays import int32
from quire.config import EngineArgs
from quire.engine.builder import build_core, resolve
from quire.models import build_model, resolve_model_path
from quire.ops.reference.gated_delta import CHUNK, chunked

HYBRID = Path(__file__).with_name("hybrid")
SETTINGS: dict[str, Any] = {
    "model": str(HYBRID), "tokenizer": str(resolve_model_path(None)), "device": "cpu",
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 2, "kv_cache_gb": 0.2,
}  # fmt: skip


def memory() -> None:
    """Writes pairs, then one of them anew, and reads what is there."""
    rng = torch.Generator().manual_seed(0)
    keys = torch.linalg.qr(torch.randn(16, 16, generator=rng)).Q[:8]
    old, new = torch.randn(8, 16, generator=rng), torch.randn(16, generator=rng)
    delta, blurred, one = torch.zeros(1, 16, 16), torch.zeros(16, 16), torch.ones(1)
    for k, v in [*zip(keys, old, strict=True), (keys[3], new)]:
        delta = mine.delta_step(delta, k[None], v[None], decay=one, strength=one)
        blurred = blurred + torch.outer(k, v)  # linear attention: adds, never takes out

    def distance(state: Tensor, key: int, wanted: Tensor) -> float:
        return float((state.T @ keys[key] - wanted).norm() / wanted.norm())

    memories = {"delta rule": delta[0], "sum of products": blurred}
    rows: list[list[Any]] = [
        [name, distance(each, 5, old[5]), distance(each, 3, new)] for name, each in memories.items()
    ]
    print(table(["memory", "error of a value", "of one that was overwritten"], rows))
    check(rows[0][2] < 1e-5, "the delta rule replaces what a key had")
    check(rows[1][2] > 0.5, "a sum of products gives the old value and the new one\n")


def chunks(length: int = 200) -> None:
    """Computes a sequence both ways, four heads at once in the shipped form of chunks."""
    rng = torch.Generator().manual_seed(1)
    q, k = (F.normalize(torch.randn(length, 4, 32, generator=rng), dim=-1) for _ in range(2))
    v = torch.randn(length, 4, 32, generator=rng)
    decay = -torch.rand(length, 4, generator=rng) * 0.2
    strength = torch.rand(length, 4, generator=rng)
    outputs, states = chunked(q, k, v, decay, strength, torch.zeros(4, 32, 32))
    state, worst = torch.zeros(4, 32, 32), 0.0
    for t in range(length):
        state = mine.delta_step(state, k[t], v[t], decay[t].exp(), strength[t])
        read = torch.einsum("hkv,hk->hv", state, q[t])
        worst = max(worst, float((read - outputs[t]).abs().max()))
    worst = max(worst, float((state - states).abs().max()))
    print(f"Steps that wait for each other: {length}, and {-(-length // CHUNK)} of {CHUNK} tokens.")
    check(worst < 1e-4, f"both forms agree: the largest difference is {worst:.0e}\n")


def sizes(hybrid: Loaded) -> None:
    """Adds up the bytes of a request, from the layouts of the model's layers."""
    layers, full = len(hybrid.spec.layers), len(hybrid.spec.attention)
    groups = build_model(hybrid.spec, device="meta").kv_groups(1)
    state = sum(group.block_bytes for group in groups if group.kind == "state")
    token = sum(group.block_bytes for group in groups if group.kind != "state")
    every = token * layers // full  # if all layers were attention
    rows = [[n, state / 1e6, token * n / 1e6, every * n / 1e6] for n in (16, 256, 4096, 65536)]
    print(table(["tokens", "states, MB", "its KV, MB", "KV of attention alone, MB"], rows))
    print(f"The states are as large as the KV of {state // max(1, every - token):,} tokens.")
    check((state > 0) == (full < layers), f"{layers - full} of {layers} layers have states\n")


def held() -> None:
    """Has the engine compute prompts, and looks at the blocks that they hold."""
    core = build_core(resolve(EngineArgs(**SETTINGS, enable_prefix_caching=False)))
    rows = []
    for length in (16, 128, 400):
        core.add(str(length), int32([1] * length), SamplingParams(), max_total=length + 9)
        core.step()
        rows.append([length, *core.stats().blocks_used])
        core.abort(str(length))
    core.shutdown()
    print(table(["tokens", "Quire's blocks", "states"], rows))
    check([row[2] for row in rows] == [1, 1, 1], "a request holds one state, however long it is\n")


def engine(length: int) -> None:
    """Runs the hybrid: cut prompts, then a prompt that begins as another one did."""
    text = (HYBRID.parents[1] / "11_quantization/story.txt").read_text("utf-8")
    tokenizer = Loaded(resolve_model_path(None)).tokenizer
    story = tokenizer.encode(text).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt, longer = story[:length], [*story[: length - 5], *story[length:][:3]]
    found, rows = [], list[list[Any]]()
    alone: dict[str, Any] = {"enable_prefix_caching": False}
    for name, settings in (
        ("Quire, whole prompts", alone),
        ("Quire, chunks of 48", {**alone, "max_num_batched_tokens": 48}),
        ("Quire, checkpoints kept", {}),
    ):
        llm = LLM(**SETTINGS, **settings)
        outputs = [llm.generate(each, params, use_tqdm=False)[0] for each in (prompt, longer)]
        llm.shutdown()
        found.append([output.outputs[0].text for output in outputs])
        rows.append([name, len(longer), outputs[1].num_cached_tokens])
    model = mine.Hybrid(HYBRID)
    core = mine.Engine(model, mine.StateCache(model, count=64), budget=48)
    requests = [mine.Request(str(ids), list(ids), len(ids) + 24) for ids in (prompt, longer)]
    for request in requests:
        core.add(request)
    core.run()
    found.append([tokenizer.hub.decode(request.tokens[-24:]) for request in requests])
    rows.append(["mine, chunks of 48", len(longer), 0])
    print(table(["engine", "tokens of the second prompt", "of them from the cache"], rows))
    same = all(each == found[0] for each in found)
    check(same, f"all write the same, however prompts are cut: {found[0][0]!r}")
    check(rows[2][2] > length / 2, f"{rows[2][2]} of {len(longer)} tokens came from a checkpoint")


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser(__doc__ or "").parse_args(arguments)
    loaded = load(args)
    memory()
    chunks()
    held()
    sizes(loaded if args.model else Loaded(HYBRID))
    engine(200)


if __name__ == "__main__":
    main(sys.argv[1:])
