"""Times the copies of KV blocks between device and host, against one large pinned copy.

    python bench/kv_copies.py                       # Qwen2.5-1.5B's blocks in bf16
    python bench/kv_copies.py --layers 36 --kv-heads 8 --out kv_copies.json

Every move is checked byte for byte before it is timed. "both" moves equally many blocks each way at
once. Without a GPU the code uses the CPU's path, which only shows that it works.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch

from quire.arrays import int32
from quire.plan import Transfer
from quire.runner.transfer.place import KVTransfer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sync() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], None], repeats: int) -> float:
    """The median of single runs, each from an idle device to an idle device."""
    times = []
    for _ in range(repeats + 2):
        sync()
        began = time.perf_counter()
        work()
        sync()
        times.append(time.perf_counter() - began)
    return sorted(times[2:])[repeats // 2]


def raw_copy(size: int, repeats: int) -> dict[str, float]:
    """GB/s of one pinned copy of `size` bytes: out, in, and both at once (of one direction)."""
    pinned = DEVICE.type == "cuda"
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    here = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if pinned else []

    def out() -> None:
        host[0].copy_(here[0], non_blocking=True)

    def back() -> None:
        here[1].copy_(host[1], non_blocking=True)

    def both() -> None:
        for stream, move in zip(streams, (out, back), strict=False):
            with torch.cuda.stream(stream):
                move()

    moves = {"out": out, "in": back} | ({"both": both} if pinned else {})
    return {name: size / seconds(move, repeats) / 1e9 for name, move in moves.items()}


class Blocks:
    """A device pool of twice `count` blocks, and a host pool of as many."""

    def __init__(self, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> None:
        self.count = count
        self.tensor = torch.empty((2 * count, *shape), dtype=dtype, device=DEVICE).normal_()
        self.size = self.tensor[0].nbytes
        self.transfer = KVTransfer([[self.tensor]], slots=2 * count, staging=count * self.size)
        order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))
        self.first, self.second = int32(order[:count]), int32(order[count:])
        self._id = 0

    def go(self, direction: str, blocks: object, slots: object) -> None:
        self._id += 1
        move = Transfer(self._id, direction, "host", 0, int32(blocks), slots=int32(slots))  # type: ignore[arg-type]
        self.transfer.start([move], direction)

    def check(self) -> bool:
        """Returns whether blocks return unchanged to other places, also during other moves."""
        before = self.tensor.clone()
        self.go("out", self.first, self.first)
        sync()
        self.go("in", self.second, self.first)
        self.go("out", self.first, self.second)
        sync()
        first = torch.from_numpy(self.first).long().to(DEVICE)
        second = torch.from_numpy(self.second).long().to(DEVICE)
        good = torch.equal(self.tensor[second], before[first])
        good &= torch.equal(self.tensor[first], before[first])
        self.tensor.normal_()
        self.go("in", self.first, self.second)
        sync()
        good &= torch.equal(self.tensor[first], before[first])
        self.transfer.ended(patient=False)
        return good

    def rates(self, repeats: int) -> dict[str, float]:
        total = self.count * self.size

        def both() -> None:
            self.go("out", self.first, self.first)
            self.go("in", self.second, self.second)

        moves: dict[str, Callable[[], None]] = {
            "out": lambda: self.go("out", self.first, self.first),
            "in": lambda: self.go("in", self.second, self.second),
            "both": both,
        }
        found = {name: total / seconds(move, repeats) / 1e9 for name, move in moves.items()}
        self.transfer.ended(patient=False)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", help="a file for the figures, as JSON")
    args = parser.parse_args()
    shape = (args.layers, 2, args.kv_heads, args.block_size, args.head_dim)
    rows, good = [], True
    for count in args.counts:
        blocks = Blocks(shape, count, getattr(torch, args.dtype))
        right = blocks.check()
        good &= right
        rates, raw = blocks.rates(args.repeats), raw_copy(count * blocks.size, args.repeats)
        shares = {name: rates[name] / raw[name] for name in raw}
        rows.append(
            {"blocks": count, "block_bytes": blocks.size, "right": right}
            | {f"{name}_gb_s": round(rate, 2) for name, rate in rates.items()}
            | {f"raw_{name}_gb_s": round(rate, 2) for name, rate in raw.items()}
            | {f"{name}_share": round(share, 3) for name, share in shares.items()}
        )
        print(json.dumps(rows[-1]), flush=True)
        del blocks
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    best = {name: max(row.get(f"{name}_share", 0.0) for row in rows) for name in ("out", "in")}
    print(f"{device}: best share of a raw copy: out {best['out']:.0%}, in {best['in']:.0%}")
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"device": device, "torch": torch.__version__, "rows": rows}, file, indent=1)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
