"""Times decode steps with no, one and many LoRA adapters on a GPU, and checks their results.

    python bench/adapters.py [--layers 36] [--rank 16] [--rows 64]

The model has Qwen3-8B's shape, random weights and adapters on all linear layers. The script
launches the engine's captured bodies of `--rows` rows of one token, without the engine. It prints
the time of a body, the adapters' bytes and their read time at the card's measured bandwidth. A
second table has requests with adapters drawn by Zipf's law: first as many adapters as the device
holds, then `--loaded` adapters that move to its slots on demand. Adapters in host memory are copies
of a few.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.executor import Capacity
from quire.features.lora.hook import COLUMN, AdapterHook
from quire.features.lora.projections import Adapter, Image, LowRank
from quire.runner import ModelRunner
from quire.runner.graphs import Graphs
from quire.runner.program import BodyShape

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}  # fmt: skip
CONTEXT = 256
"""Positions before the token that a row computes."""


def random_adapter(hook: AdapterHook, rank: int, seed: int) -> Image:
    """Returns a random adapter of all linear layers."""
    draw = torch.Generator("cuda").manual_seed(seed)
    layout = hook.pool.layout
    adapter = Adapter(str(seed))
    for targets in layout.targets.values():
        for t in targets:
            a, b = (
                torch.randn(shape, generator=draw, device="cuda", dtype=layout.dtype).mul_(0.02)
                for shape in ((rank, t.inputs), (t.size, rank))
            )
            part = LowRank(a.cpu(), b.cpu(), 2.0)
            adapter.parts[t.layer, t.place] = part
    return layout.image(adapter, pinned=True)


class Bench:
    """A runner with `slots` adapters on its device, whose lanes decode."""

    def __init__(self, folder: Path, *, slots: int, rank: int, rows: int) -> None:
        config = resolve(
            EngineArgs(
                model=str(folder), device="cuda", dtype="bfloat16", load_format="dummy",
                skip_tokenizer_init=True, max_num_seqs=rows, max_num_batched_tokens=rows,
                max_model_len=2 * CONTEXT, num_kv_blocks=rows * (2 * CONTEXT // 16),
                enable_lora=True, max_loras=slots, max_lora_rank=rank, enforce_eager=True,
            )
        )  # fmt: skip
        self.rows, self.slots = rows, slots
        self.hook = AdapterHook(config)
        self.runner = ModelRunner(config, hooks=[self.hook])
        self.capacity: Capacity = self.runner.start()
        state = self.runner.state
        self._prepare(state)
        self.column = state.columns[COLUMN]
        self.graphs = Graphs(state.device, state.limits)
        self.shapes = {
            False: BodyShape(rows, rows, 1, altered=False),
            True: BodyShape(rows, rows, 1, altered=True),
        }
        program = self.runner.sized.program
        with torch.inference_mode():
            self.graphs.capture(
                {
                    shape: lambda shallow, shape=shape: program.body(shape, shallow=shallow)  # type: ignore[misc]
                    for shape in self.shapes.values()
                }
            )

    def _prepare(self, state: Any) -> None:
        """Lets every row compute a token behind `CONTEXT` others, in blocks of its own."""
        rows = self.rows
        packed = state.idle_inputs()
        lanes, query_start, logit_start, flags, *_ = state.split_inputs(packed)
        lanes[:rows] = np.arange(rows)
        query_start[: rows + 1] = np.arange(rows + 1)
        query_start[rows + 1 :] = rows
        logit_start[:] = 0
        flags[:rows] = 0
        state.inputs.copy_(torch.from_numpy(packed))
        state.position.fill_(CONTEXT)
        state.tokens.random_(0, 1000)
        for table in state.tables:
            blocks = torch.arange(table.numel(), dtype=torch.int32, device=table.device)
            table.copy_(blocks.view_as(table) % sum(self.capacity.num_blocks))

    def fill(self, image: Image, slot: int) -> None:
        with torch.inference_mode():
            self.hook.pool.put(image, slot)

    def choose(self, slots: list[int]) -> None:
        """Sets the slot of each row."""
        with torch.inference_mode():
            self.column.copy_(torch.tensor(slots, dtype=torch.int32))

    def hidden(self, altered: bool) -> torch.Tensor:
        """Runs a step. Returns its hidden states, [rows, width]."""
        self.runner.state.position.fill_(CONTEXT)
        self.graphs.replay(self.shapes[altered])
        torch.cuda.synchronize()
        return self.runner.sized.program.hidden[: self.rows].clone()

    def microseconds(self, altered: bool, repeats: int = 20) -> float:
        """Returns the median time of a step."""
        return median_us(lambda: self.graphs.replay(self.shapes[altered]), repeats)


def median_us(run: Any, repeats: int) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


class Traffic:
    """Requests of 64 to 192 tokens whose adapters are drawn by Zipf's law, exponent 1.

    A requested adapter takes the slot that was used least recently. A request waits in line until
    its adapter is loaded. Requests after it may overtake it.

    Args:
        loaded: number of adapters to draw from.
    """

    WAITING = 16
    """Requests in line."""

    def __init__(self, bench: Bench, images: list[Image], loaded: int) -> None:
        self._bench, self._images = bench, images
        self._draw = np.random.default_rng(0)
        shares = 1 / np.arange(1, loaded + 1)
        self._shares = shares / shares.sum()
        # By adapter, least recently used first.
        self._resident = collections.OrderedDict((i, i) for i in reversed(range(bench.slots)))
        self._loading: dict[int, tuple[int, torch.cuda.Event]] = {}
        self._users = [0] * bench.slots
        self._waiting: list[int] = []
        self._adapters: list[int | None] = [None] * bench.rows
        self._left = [0] * bench.rows
        self._stream = torch.cuda.Stream()
        self.loads = 0
        self.active = 0.0

    def tokens_per_second(self, steps: int = 400, warmup: int = 100) -> float:
        """Runs steps, two of them ahead of the device, and returns the tokens per second.

        Sets `loads`, and in `active` the mean number of adapters in a step.
        """
        bench, tokens, active, began = self._bench, 0, 0, 0.0
        slots = torch.empty(3, bench.rows, dtype=torch.int32, pin_memory=True)
        events = [torch.cuda.Event() for _ in range(3)]
        with torch.inference_mode():
            for step in range(warmup + steps):
                if step == warmup:
                    torch.cuda.synchronize()
                    began, self.loads, tokens, active = time.monotonic(), 0, 0, 0
                if step > 2:
                    events[step % 3].synchronize()
                self._plan(events[(step - 1) % 3] if step else None)
                for row, adapter in enumerate(self._adapters):
                    slots[step % 3, row] = -1 if adapter is None else self._resident[adapter]
                    self._left[row] -= adapter is not None
                    tokens += adapter is not None
                active += len(set(self._adapters) - {None})
                bench.column.copy_(slots[step % 3], non_blocking=True)
                bench.graphs.replay(bench.shapes[True])
                events[step % 3].record()
            torch.cuda.synchronize()
        self.active = active / steps
        return tokens / (time.monotonic() - began)

    def _plan(self, before: torch.cuda.Event | None) -> None:
        """Ends and begins requests and loads. The last launched step ends at `before`."""
        for loaded, (slot, event) in list(self._loading.items()):
            if event.query():
                self._resident[loaded] = slot
                del self._loading[loaded]
        while len(self._waiting) < self.WAITING:
            self._waiting.append(int(self._draw.choice(len(self._shares), p=self._shares)))
        for row, adapter in enumerate(self._adapters):
            if self._left[row]:
                continue
            if adapter is not None:
                self._users[self._resident[adapter]] -= 1
            self._adapters[row] = new = next(
                (a for a in self._waiting if a in self._resident), None
            )
            if new is not None:
                self._waiting.remove(new)
                self._waiting.append(int(self._draw.choice(len(self._shares), p=self._shares)))
                self._resident.move_to_end(new)
                self._users[self._resident[new]] += 1
                self._left[row] = int(self._draw.integers(64, 193))
        for asked in self._waiting:
            if asked not in self._resident and asked not in self._loading:
                self._load(asked, before)

    def _load(self, adapter: int, before: torch.cuda.Event | None) -> None:
        """Starts to copy an adapter to the slot used least recently, if any is free."""
        unused = (a for a, slot in self._resident.items() if not self._users[slot])
        victim = next((a for a in unused if a not in self._waiting), None)
        if victim is None:
            return
        slot = self._resident.pop(victim)
        with torch.cuda.stream(self._stream):
            if before is not None:
                self._stream.wait_event(before)
            self._bench.fill(self._images[adapter % len(self._images)], slot)
            event = torch.cuda.Event()
            event.record()
        self._loading[adapter] = slot, event
        self.loads += 1


def read_bandwidth() -> float:
    """Returns the bytes per second at which the card sums up 4 GB."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return data.nbytes / (median_us(lambda: torch.sum(data), 5) * 1e-6)


def check_steps(bench: Bench) -> None:
    """Raises if base rows of a mixed step change, or if rows with adapters do not."""
    rows = bench.rows
    base = bench.hidden(False)
    slots = [row % bench.slots if row % 2 else -1 for row in range(rows)]
    bench.choose(slots)
    mixed = bench.hidden(True)
    for row, slot in enumerate(slots):
        assert torch.equal(mixed[row], base[row]) == (slot < 0), row
    bench.choose([-1] * rows)
    assert torch.equal(bench.hidden(True), base)
    bench.choose(slots)
    assert torch.equal(bench.hidden(True), mixed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--loaded", type=int, default=1000)
    options = parser.parse_args()
    began = time.monotonic()
    bandwidth = read_bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "num_hidden_layers": options.layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        bench = Bench(Path(folder), slots=options.rows, rank=options.rank, rows=options.rows)
    images = [random_adapter(bench.hook, options.rank, seed) for seed in range(2)]
    for slot in range(options.rows):
        bench.fill(images[slot % 2], slot)
    torch.cuda.synchronize()
    nbytes = images[0].data.nbytes
    print(f"loaded and captured ({time.monotonic() - began:.0f} s)", flush=True)
    copy_us = median_us(lambda: bench.fill(images[0], 0), 5)
    base = bench.microseconds(False)
    lines = [("base", 0, base, base)]
    for active in (1, 4, 16, options.rows):
        bench.choose([row % active for row in range(options.rows)])
        floor = base + active * nbytes / bandwidth * 1e6
        lines.append((f"{active} active", active, bench.microseconds(True), floor))
    bench.choose([0, *[-1] * (options.rows - 1)])
    lines.append(("1 row of 1", 1, bench.microseconds(True), base + nbytes / bandwidth * 1e6))
    bench.choose([-1] * options.rows)
    lines.append(("none, adapted body", 0, bench.microseconds(True), base))
    print(
        f"\n{torch.cuda.get_device_name()}: {options.layers} layers, rank {options.rank}, "
        f"{options.rows} rows, {nbytes / 1e6:.0f} MB an adapter, {bandwidth / 1e12:.2f} TB/s read, "
        f"to a slot in {copy_us / 1e3:.1f} ms, {time.monotonic() - began:.0f} s in all\n"
    )
    print("| step | µs | of base | base + bytes, µs | of that |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, _, found, floor in lines:
        print(f"| {name} | {found:.0f} | {found / base:.3f} | {floor:.0f} | {found / floor:.3f} |")
    print("\n| adapters, by Zipf's law | tokens/s | of the first | active in a step | loads |")
    print("| --- | ---: | ---: | ---: | ---: |")
    first = 0.0
    for loaded in (bench.slots, options.loaded):
        traffic = Traffic(bench, images, loaded)
        rate = traffic.tokens_per_second()
        first = first or rate
        print(
            f"| {loaded} | {rate:.0f} | {rate / first:.3f} | {traffic.active:.1f} "
            f"| {traffic.loads} |",
            flush=True,
        )
    for slot in range(options.rows):
        bench.fill(images[slot % 2], slot)
    check_steps(bench)
    print(f"base rows keep their bits ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
