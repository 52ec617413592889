"""Measures updates of weights, and sleep in place, on one GPU or two.

    python bench/weight_updates.py bench/configs/qwen3-8b [--trainer cuda:1]

Weights are random. The tensors of a trainer lie in pinned host memory, then in another process on a
GPU. Prompts are new to the prefix cache, which is off, so equal weights give equal tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from quire import LLM, SamplingParams
from quire.arrays import int32
from quire.features.weight_updates.calls import JOIN, UPDATE, UpdateWeights
from quire.features.weight_updates.feature import HOLD
from quire.features.weight_updates.offline import run_call
from quire.features.weight_updates.payloads import (
    CudaIpcSource,
    GroupSource,
    JoinGroup,
    LocalSource,
    TensorEntry,
)
from quire.models.config import family_named
from quire.models.weights import _stored_shape, places_of
from quire.tools.bench.record import make_record
from tables import print_and_append
from weight_trainer import random_tensors

STREAMS = 16
_TEXT = 600
_UPDATE_AT = (150, 300, 450)
"""Steps at which an update is asked for."""
_PROMPT = [list(range(100, 164))]


def used_gb() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def shapes_of(llm: LLM) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the checkpoint's tensors by their names."""
    model = llm._core._executor.model
    places = places_of(model, family_named(model.spec.family))
    return {name: _stored_shape(each) for name, each in places.items()}


def trained(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Returns new random tensors in pinned memory."""
    tensors = {
        name: torch.empty(made.shape, dtype=made.dtype, pin_memory=True).copy_(made)
        for name, made in random_tensors(shapes, "cuda:0")
    }
    torch.cuda.empty_cache()
    return tensors


def hundred_ids(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    ids: list[int] = llm.generate(_PROMPT, params, False)[0].outputs[0].token_ids
    return ids


def link_gb_s() -> float:
    """Returns the speed of plain copies from pinned memory."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
    return 8 * host.nbytes / 1e9 / (time.perf_counter() - began)


def update_seconds(llm: LLM, update: Callable[[], Any], times: int = 3) -> float:
    """Returns the best time of some updates."""
    found = []
    for _ in range(times):
        stats = llm.stats().weight_updates
        before = stats.seconds if stats else 0.0
        update()
        found.append(llm.stats().weight_updates.seconds - before)
    return min(found)


def gaps_beside_updates(llm: LLM, tensors: dict[str, torch.Tensor]) -> list[float]:
    """Returns the seconds between the tokens of running streams, ascending."""
    core = llm._core
    number = core.call(HOLD, tensors)
    params = SamplingParams(temperature=0.0, max_tokens=_TEXT, ignore_eos=True)
    for i in range(STREAMS):
        core.add(f"stream-{i}", int32([i + 1] * 32), params, max_total=_TEXT + 100)
    times: list[float] = []
    while core.has_work():
        progress = core.step()
        if progress is not None and len(progress) and progress.n_tokens.sum():
            times.append(time.perf_counter())
            if len(times) in _UPDATE_AT:
                core.call(UPDATE, UpdateWeights(LocalSource(number), "keep"))
    core.call(HOLD, number)
    return sorted(np.diff(times).tolist())


def sleep_metrics(llm: LLM, level: int, times: int) -> dict[str, float]:
    """Returns the times of several sleeps, and whether the first 100 ids were the same."""
    before, metrics = hundred_ids(llm), {}
    for number in range(1, times + 1):
        began = time.perf_counter()
        llm.sleep(level)
        asleep, held = time.perf_counter(), used_gb()
        begun = time.perf_counter()
        llm.wake_up()
        awake = time.perf_counter()
        llm.generate(_PROMPT, SamplingParams(temperature=0.0, max_tokens=1), False)
        first = time.perf_counter()
        found = {
            "sleep_s": asleep - began, "wake_s": awake - begun, "first_token_s": first - begun,
            "asleep_gb": held, "same_100_ids": float(hundred_ids(llm) == before),
        }  # fmt: skip
        metrics |= {f"level{level}_{number}_{name}": value for name, value in found.items()}
    return metrics


class Trainer:
    """A trainer's process; see `weight_trainer.py`."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: str) -> None:
        self.shapes = shapes
        command = [sys.executable, str(Path(__file__).with_name("weight_trainer.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
        )
        self.send({"tensors": shapes, "device": device})
        self.read()

    def send(self, command: Any) -> None:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def read(self) -> bytes:
        return self._process.stdout.readline().encode()

    def close(self) -> None:
        self.send("end")
        self._process.wait(30)


def ipc_metrics(llm: LLM, trainer: Trainer, size: float) -> dict[str, float]:
    trainer.send("ipc")
    source = msgspec.json.decode(trainer.read(), type=CudaIpcSource)
    seconds = update_seconds(llm, lambda: llm.update_weights(source, mode="keep"))
    return {"ipc_update_s": seconds, "ipc_gb_s": size / seconds}


def group_metrics(llm: LLM, trainer: Trainer, size: float) -> dict[str, float]:
    """Returns the times of updates by NCCL. The first one opens NCCL's connections too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = JoinGroup("127.0.0.1", port, 1, 2, backend="nccl", timeout=60.0)
    trainer.send({"group": msgspec.to_builtins(group), "times": 3})
    trainer.read()
    run_call(llm._core, JOIN, group)
    tensors = tuple(TensorEntry(name, "BF16", shape) for name, shape in trainer.shapes.items())
    source = GroupSource(group.group, tensors)
    seconds = update_seconds(llm, lambda: llm.update_weights(source, mode="keep"))
    trainer.read()
    return {"nccl_update_s": seconds, "nccl_gb_s": size / seconds}


def trainer_metrics(llm: LLM, shapes: Any, device: str, size: float) -> dict[str, float]:
    """Returns the times of updates from another process, and whether the tokens are those of the
    same tensors in host memory."""
    expected = hundred_ids(llm)
    trainer = Trainer(shapes, device)
    ways = {"ipc": ipc_metrics}
    if device != "cuda:0":
        ways["nccl"] = group_metrics
    metrics: dict[str, float] = {}
    for name, measure in ways.items():
        ones = torch.ones(shapes["model.norm.weight"], dtype=torch.bfloat16)
        llm.update_weights([("model.norm.weight", -ones)])
        changed = hundred_ids(llm) != expected
        metrics |= measure(llm, trainer, size)
        metrics[f"{name}_same_100_ids"] = float(changed and hundred_ids(llm) == expected)
    trainer.close()
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--trainer", default="cuda:0", help="GPU of the trainer's process")
    parser.add_argument("--skip-sleep", action="store_true", help="measure updates only")
    parser.add_argument("--out", type=Path, help="append the record to this JSONL file")
    args = parser.parse_args()
    llm = LLM(
        args.folder, load_format="dummy", skip_tokenizer_init=True, enable_sleep_mode=True,
        enable_prefix_caching=False, max_num_seqs=STREAMS, max_num_batched_tokens=1024,
        max_model_len=2048, kv_cache_gb=16.0,
    )  # fmt: skip
    metrics = {"used_gb": used_gb()}
    # Level 2 reads the checkpoint again, so it comes before weights change.
    if not args.skip_sleep:
        metrics |= sleep_metrics(llm, 2, 1)
    shapes = shapes_of(llm)
    tensors = trained(shapes)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    seconds = update_seconds(llm, lambda: llm.update_weights(tensors.items(), mode="keep"))
    metrics |= {
        "bytes_gb": size, "link_gb_s": link_gb_s(), "update_s": seconds,
        "update_gb_s": size / seconds,
    }  # fmt: skip
    if not args.skip_sleep:
        gaps = gaps_beside_updates(llm, tensors)
        metrics |= {
            "itl_p50_ms": 1e3 * gaps[len(gaps) // 2],
            "itl_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
            "longest_pause_ms": 1e3 * gaps[-1],
            **sleep_metrics(llm, 1, 3),
        }
    metrics |= trainer_metrics(llm, shapes, args.trainer, size)
    record = make_record("weight_updates", metrics, model=Path(args.folder).name, device="cuda",
                         settings={"streams": STREAMS, "updates": len(_UPDATE_AT),
                                   "trainer": args.trainer})  # fmt: skip
    print_and_append([record], args.out)
    llm.shutdown()


if __name__ == "__main__":
    main()
