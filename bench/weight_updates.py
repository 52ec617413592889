"""Measures updates of weights from host memory, and sleep in place, on one GPU.

    python bench/weight_updates.py bench/configs/qwen3-8b

Weights are random. The tensors of a trainer lie in pinned host memory.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from quire import LLM, SamplingParams
from quire.arrays import int32
from quire.features.weight_updates.calls import UPDATE, UpdateWeights
from quire.features.weight_updates.feature import HOLD
from quire.features.weight_updates.payloads import LocalSource
from quire.models.config import family_named
from quire.models.weights import _stored_shape, places_of
from quire.tools.bench.record import make_record
from tables import print_and_append

STREAMS = 16
_TEXT = 600
_UPDATE_AT = (150, 300, 450)
"""Steps at which an update is asked for."""
_PROMPT = [list(range(100, 164))]


def used_gb() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def trained(llm: LLM) -> dict[str, torch.Tensor]:
    """Returns new random tensors by the checkpoint's names, in pinned memory."""
    model = llm._core._executor.model
    draw = torch.Generator(device="cuda").manual_seed(7)
    tensors = {}
    for name, places in places_of(model, family_named(model.spec.family)).items():
        shape = _stored_shape(places)
        made = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        made = made.fill_(1.0) if len(shape) == 1 else made.normal_(0, 0.02, generator=draw)
        tensors[name] = torch.empty(shape, dtype=torch.bfloat16, pin_memory=True).copy_(made)
    torch.cuda.empty_cache()
    return tensors


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


def update_seconds(llm: LLM, tensors: dict[str, torch.Tensor]) -> float:
    """Returns the best time of three updates."""
    times = []
    for _ in range(3):
        found = llm.stats().weight_updates
        before = found.seconds if found else 0.0
        llm.update_weights(tensors.items(), mode="keep")
        times.append(llm.stats().weight_updates.seconds - before)
    return min(times)


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


def sleep_metrics(llm: LLM, level: int) -> dict[str, float]:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    texts = [llm.generate(_PROMPT, params, False)[0].outputs[0].token_ids]
    began = time.perf_counter()
    llm.sleep(level)
    asleep, held = time.perf_counter(), used_gb()
    begun = time.perf_counter()
    llm.wake_up()
    awake = time.perf_counter()
    llm.generate(_PROMPT, SamplingParams(temperature=0.0, max_tokens=1), False)
    first = time.perf_counter()
    texts.append(llm.generate(_PROMPT, params, False)[0].outputs[0].token_ids)
    found = {
        "sleep_s": asleep - began, "wake_s": awake - begun, "first_token_s": first - begun,
        "asleep_gb": held, "same_text": float(texts[0] == texts[1]),
    }  # fmt: skip
    return {f"{name}_{level}": value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--out", type=Path, help="append the record to this JSONL file")
    args = parser.parse_args()
    llm = LLM(
        args.folder, load_format="dummy", skip_tokenizer_init=True, enable_sleep_mode=True,
        enable_prefix_caching=False, max_num_seqs=STREAMS, max_num_batched_tokens=1024,
        max_model_len=2048, gpu_memory_utilization=0.85,
    )  # fmt: skip
    used = used_gb()
    # Level 2 reads the checkpoint again, so it comes before weights change.
    metrics = sleep_metrics(llm, 2)
    tensors = trained(llm)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    seconds = update_seconds(llm, tensors)
    gaps = gaps_beside_updates(llm, tensors)
    metrics |= {
        "bytes_gb": size, "update_s": seconds, "update_gb_s": size / seconds,
        "link_gb_s": link_gb_s(), "itl_p50_ms": 1e3 * gaps[len(gaps) // 2],
        "itl_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))], "longest_pause_ms": 1e3 * gaps[-1],
        "used_gb": used, **sleep_metrics(llm, 1),
    }  # fmt: skip
    record = make_record("weight_updates", metrics, model=Path(args.folder).name, device="cuda",
                         settings={"streams": STREAMS, "updates": len(_UPDATE_AT)})  # fmt: skip
    print_and_append([record], args.out)
    llm.shutdown()


if __name__ == "__main__":
    main()
