"""An engine in one file: each lesson adds a section at its end.

The pages of the lessons show this code piece by piece. Only PyTorch, safetensors and tokenizers
are imported, nothing of Quire.
"""

# ---- Lesson 1: autoregressive generation ----
from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class Model:
    """A Qwen3 over the tensors of a checkpoint, under the names that they have in its files."""

    def __init__(self, folder: Path) -> None:
        self.config = config = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        self.w = {name: w.float() for file in files for name, w in load_file(file).items()}
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.eps: float = config["rms_norm_eps"]
        # One frequency for each pair of dimensions of a head: from 1 down to 1 / theta.
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        self.frequencies = theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)

    def forward(self, ids: Tensor, positions: Tensor, memory: Any) -> Tensor:
        """Computes tokens, int [T], at their positions. Returns hidden states, [T, hidden]."""
        x = self.w["model.embed_tokens.weight"][ids]
        for layer in range(self.layers):
            x = self.block(x, layer, positions, memory)
        return x

    def block(self, x: Tensor, layer: int, positions: Tensor, memory: Any) -> Tensor:
        normed = self.norm(x, layer, "input_layernorm")
        x = x + self.attention(normed, layer, positions, memory)
        return x + self.mlp(self.norm(x, layer, "post_attention_layernorm"), layer)

    def logits(self, x: Tensor) -> Tensor:
        """Returns a score for every token of the vocabulary, [..., vocab]."""
        x = self.rms_norm(x, self.w["model.norm.weight"])
        # Tied models use the embeddings again.
        return F.linear(x, self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]))

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def norm(self, x: Tensor, layer: int, name: str) -> Tensor:
        return self.rms_norm(x, self.w[f"model.layers.{layer}.{name}.weight"])

    def linear(self, x: Tensor, layer: int, name: str) -> Tensor:
        return F.linear(x, self.w[f"model.layers.{layer}.{name}_proj.weight"])

    def attention(self, x: Tensor, layer: int, positions: Tensor, memory: Any) -> Tensor:
        """Returns what each token sees of itself and of those before it, [T, hidden]."""
        q, k, v = (
            self.linear(x, layer, f"self_attn.{each}").view(len(x), -1, self.head_dim)
            for each in "qkv"
        )
        q = self.rotate(self.norm(q, layer, "self_attn.q_norm"), positions)
        k = self.rotate(self.norm(k, layer, "self_attn.k_norm"), positions)
        seen = memory.attend(layer, q, k, v)
        return self.linear(seen.flatten(1), layer, "self_attn.o")

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turns the pair (i, i + head_dim / 2) of each head by position * frequency."""
        angles = positions[:, None, None] * self.frequencies
        (a, b), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        gated = F.silu(self.linear(x, layer, "mlp.gate")) * self.linear(x, layer, "mlp.up")
        return self.linear(gated, layer, "mlp.down")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends from the last len(q) of len(k) positions. All are [positions, heads, head_dim]."""
    share = q.shape[1] // k.shape[1]  # query heads that read one head of k and v
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    future = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)


class NoCache:
    """Keeps nothing: the tokens of a call see each other."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)


Pick = Callable[[Tensor, int], int]
"""Chooses a token from its logits, float [vocab], and its position."""


def greedy(logits: Tensor, position: int) -> int:
    return int(logits.argmax())


class Sample:
    """Draws tokens. The noise depends on the seed and the position, and on nothing else."""

    def __init__(self, seed: int, temperature: float = 0.8) -> None:
        self.seed, self.temperature = seed, temperature

    def __call__(self, logits: Tensor, position: int) -> int:
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + position)
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        noise = -torch.empty_like(logits).exponential_(generator=rng).log()
        return int((logits / self.temperature + noise).argmax())


def generate(model: Model, ids: list[int], count: int, pick: Pick) -> list[int]:
    """Appends tokens one at a time. Each is picked after computing the whole text again."""
    ids = list(ids)
    for _ in range(count):
        x = model.forward(torch.tensor(ids), torch.arange(len(ids)), NoCache())
        ids.append(pick(model.logits(x[-1]), len(ids)))
    return ids[-count:]


# ---- Lesson 2: the KV cache ----
class Cache:
    """Keys and values of one sequence, in tensors with room for a number of tokens."""

    def __init__(self, model: Model, room: int) -> None:
        shape = model.layers, room, model.kv_heads, model.head_dim
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.length = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        end = self.length + len(q)
        self.k[layer, self.length : end] = k
        self.v[layer, self.length : end] = v
        return attention(q, self.k[layer, :end], self.v[layer, :end])


def extend(model: Model, ids: list[int], cache: Cache) -> Tensor:
    """Computes the tokens behind those in the cache. Returns the logits after the last one."""
    end = cache.length + len(ids)
    x = model.forward(torch.tensor(ids), torch.arange(cache.length, end), cache)
    cache.length = end
    return model.logits(x[-1])


def generate_cached(model: Model, ids: list[int], count: int, pick: Pick) -> list[int]:
    """Generates as before, and computes each token once: the prompt first, then one by one."""
    ids, cache = list(ids), Cache(model, len(ids) + count)
    for _ in range(count):
        ids.append(pick(extend(model, ids[cache.length :], cache), len(ids)))
    return ids[-count:]


# ---- Lesson 3: paged KV ----
class Blocks:
    """A list of free blocks, and a table of blocks for each sequence."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.free = list(range(count))
        self.tables: dict[str, list[int]] = {}

    def open(self, name: str, tokens: list[int]) -> int:
        """Begins a sequence. Returns how many of its tokens are there already: here none."""
        self.tables[name] = []
        return 0

    def grow(self, name: str, length: int) -> None:
        """Gives a sequence blocks until it has room for `length` tokens."""
        table = self.tables[name]
        while len(table) * self.size < length:
            table.append(self.free.pop())

    def close(self, name: str, tokens: list[int]) -> None:
        """Ends a sequence, whose computed tokens these are, and takes its blocks back."""
        self.free += self.tables.pop(name)


Row = tuple[str, int, int]
"""A sequence's tokens in a step: its name, the first position, the number of tokens."""


class PagedCache(Blocks):
    """Keys and values of all sequences, in one pool of blocks."""

    def __init__(self, model: Model, count: int, size: int = 16) -> None:
        super().__init__(count, size)
        shape = model.layers, count, size, model.kv_heads, model.head_dim
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)

    def begin(self, rows: list[Row]) -> None:
        """Prepares a step: books blocks, and finds a slot for each of its tokens."""
        self.rows, slots = rows, []
        for name, start, count in rows:
            self.grow(name, start + count)
            table, positions = torch.tensor(self.tables[name]), torch.arange(start, start + count)
            slots.append(table[positions // self.size] * self.size + positions % self.size)
        self.slots = torch.cat(slots)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k[layer].flatten(0, 1)[self.slots] = k
        self.v[layer].flatten(0, 1)[self.slots] = v
        return self.read(layer, q)

    def read(self, layer: int, q: Tensor) -> Tensor:
        """Attends row by row, over a copy of the row's blocks. Lesson 5 avoids the copy."""
        seen, parts = [], torch.split(q, [count for _, _, count in self.rows])
        for (name, start, count), queries in zip(self.rows, parts, strict=True):
            table = self.tables[name]
            k, v = (kv[layer, table].flatten(0, 1)[: start + count] for kv in (self.k, self.v))
            seen.append(attention(queries, k, v))
        return torch.cat(seen)


# ---- Lesson 4: continuous batching ----
from collections import deque
from dataclasses import dataclass
from itertools import accumulate


@dataclass(eq=False)
class Request:
    """A request has tokens that it knows, and some of them are computed.

    Attributes:
        tokens: the prompt, then the answer.
        limit: length of prompt and answer at which the request ends.
        stop: token that ends the answer.
        computed: number of tokens whose keys and values the cache has.
    """

    name: str
    tokens: list[int]
    limit: int
    pick: Pick = greedy
    stop: int | None = None
    computed: int = 0

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.limit or self.tokens[-1] == self.stop


class Engine:
    """Computes the requests' tokens in steps of at most `budget` tokens and `most` rows."""

    def __init__(self, model: Model, cache: PagedCache, budget: int = 256, most: int = 16) -> None:
        self.model, self.cache, self.budget, self.most = model, cache, budget, most
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> None:
        """Starts those who wait, as long as all that run can grow to their ends."""
        while self.waiting and len(self.running) < self.most:
            first = self.waiting[0]
            ends = sum(-(-each.limit // self.cache.size) for each in [*self.running, first])
            if ends > self.cache.count:
                return
            first.computed = self.cache.open(first.name, first.tokens)
            self.running.append(self.waiting.popleft())

    def plan(self) -> list[tuple[Request, int]]:
        """Chooses a step's rows: those that lack one token, then prompts, as far as they fit."""
        rows, budget = [], self.budget
        for request in sorted(self.running, key=lambda each: len(each.tokens) - each.computed > 1):
            count = min(len(request.tokens) - request.computed, budget)
            if count:
                rows.append((request, count))
                budget -= count
        return rows

    def compute(self, rows: list[tuple[Request, int]]) -> Tensor:
        """Computes all rows in one pass. Returns hidden states, [tokens, hidden]."""
        spans = [(each, each.computed, each.computed + count) for each, count in rows]
        self.cache.begin([(each.name, start, end - start) for each, start, end in spans])
        ids = [token for each, start, end in spans for token in each.tokens[start:end]]
        positions = [place for _, start, end in spans for place in range(start, end)]
        return self.model.forward(torch.tensor(ids), torch.tensor(positions), self.cache)

    def step(self) -> list[tuple[Request, int]]:
        """Plans and computes a step, and returns its rows."""
        self.admit()
        rows = self.plan()
        x = self.compute(rows)
        logits = self.model.logits(x[[end - 1 for end in accumulate(n for _, n in rows)]])
        for (request, count), scores in zip(rows, logits, strict=True):
            request.computed += count
            if request.computed == len(request.tokens):  # else more of its prompt comes later
                request.tokens.append(request.pick(scores, len(request.tokens)))
            if request.done:
                self.remove(request)
        return rows

    def remove(self, request: Request) -> None:
        """Ends a request that waits or runs."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
            self.cache.close(request.name, request.tokens[: request.computed])

    def run(self) -> None:
        """Steps until nobody waits or runs."""
        while self.waiting or self.running:
            self.step()


# ---- Lesson 5: kernels ----
class KernelCache(PagedCache):
    """Reads blocks where they lie: a kernel attends for rows of one token."""

    def __init__(
        self, model: Model, count: int, size: int = 16, kernel: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__(model, count, size)
        self.kernel = kernel

    def read(self, layer: int, q: Tensor) -> Tensor:
        if self.kernel is None or len(q) > len(self.rows):
            return super().read(layer, q)
        tables = [torch.tensor(self.tables[name]) for name, _, _ in self.rows]
        table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).int()
        lengths = torch.tensor([start + 1 for _, start, _ in self.rows], dtype=torch.int32)
        scale = 1 / math.sqrt(q.shape[2])
        return self.kernel(q.contiguous(), self.k[layer], self.v[layer], table, lengths, scale)


# ---- Lesson 6: the roofline ----
class Work:
    """FLOPs and bytes of a step of a dense model like Qwen3, from its config.json."""

    def __init__(self, config: dict[str, Any], itemsize: int) -> None:
        hidden, layers, self.itemsize = config["hidden_size"], config["num_hidden_layers"], itemsize
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config.get("head_dim") or hidden // heads
        attention = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden
        self.body = layers * (attention + 3 * hidden * config["intermediate_size"])
        self.head = config["vocab_size"] * hidden
        self.kv = 2 * layers * kv_heads * dim  # values that a token leaves in the cache
        self.pair = 4 * layers * heads * dim  # FLOPs of one query and one key

    def flops(self, rows: list[Row]) -> float:
        """A product of n tokens with k weights takes 2 n k. Each row ends in logits."""
        pairs = sum(n * start + n * (n + 1) // 2 for _, start, n in rows)
        tokens = sum(n for _, _, n in rows)
        return float(2 * tokens * self.body + 2 * len(rows) * self.head + pairs * self.pair)

    def bytes(self, rows: list[Row]) -> float:
        """Weights are read once a step. Each row reads its keys and values, and writes new ones."""
        seen = sum(start + 2 * n for _, start, n in rows)
        return float(self.itemsize * (self.body + self.head + seen * self.kv))


# ---- Lesson 7: prefix caching ----
import hashlib
from array import array
from collections.abc import Iterator


def block_keys(tokens: list[int], size: int) -> Iterator[bytes]:
    """Yields a key for each whole block: a hash of all tokens up to its end."""
    key = b""
    for end in range(size, len(tokens) + 1, size):
        # The key before goes in: behind other tokens the same ones have other keys and values.
        data = key + array("i", tokens[end - size : end]).tobytes()
        yield (key := hashlib.blake2b(data, digest_size=16).digest())


class PrefixCache(KernelCache):
    """Keeps the blocks of sequences that ended, for prompts that begin in the same way."""

    def __init__(
        self, model: Model, count: int, size: int = 16, kernel: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__(model, count, size, kernel)
        self.users = [0] * count  # sequences that hold each block
        self.known: dict[bytes, int] = {}  # blocks by key, the least recently used first

    def open(self, name: str, tokens: list[int]) -> int:
        self.tables[name] = table = []
        # The last token is always computed, because somebody needs its logits.
        for key in block_keys(tokens[:-1], self.size):
            if key not in self.known:
                break
            table.append(self.known[key])
            self.users[self.known[key]] += 1
        return len(table) * self.size

    def grow(self, name: str, length: int) -> None:
        table = self.tables[name]
        while len(table) * self.size < length:
            table.append(self.free.pop() if self.free else self.evict())
            self.users[table[-1]] = 1

    def evict(self) -> int:
        """Forgets the least recently used block that no sequence holds."""
        return self.known.pop(next(k for k, block in self.known.items() if not self.users[block]))

    def close(self, name: str, tokens: list[int]) -> None:
        table = self.tables.pop(name)
        for block in table:
            self.users[block] -= 1
        keys = list(block_keys(tokens, self.size))
        # The end of a text goes first, so that a beginning never goes before what hangs on it.
        for key, block in reversed(list(zip(keys, table, strict=False))):
            self.known[key] = self.known.pop(key, block)
        kept = set(self.known.values())
        self.free += [block for block in table if not self.users[block] and block not in kept]


# ---- Lesson 8: speculative decoding ----
class DraftEngine(Engine):
    """Verifies the guesses of a small model: several tokens of a request in one pass."""

    def __init__(
        self, model: Model, cache: PagedCache, draft: Model, drafts: int = 4, **limits: int
    ) -> None:
        super().__init__(model, cache, **limits)
        self.draft, self.drafts = draft, drafts
        self.drafters: dict[str, Cache] = {}
        self.passes = self.drafted = self.accepted = 0

    def propose(self, request: Request) -> list[int]:
        """Continues a text with the draft model, under the request's own noise."""
        if request.name not in self.drafters:
            self.drafters[request.name] = Cache(self.draft, request.limit)
        cache, tokens = self.drafters[request.name], list(request.tokens)
        for _ in range(min(self.drafts, request.limit - len(tokens) - 1)):
            scores = extend(self.draft, tokens[cache.length :], cache)
            tokens.append(request.pick(scores, len(tokens)))
        return tokens[len(request.tokens) :]

    def step(self) -> list[tuple[Request, int]]:
        self.admit()
        rows, drafted = [], []
        for request, count in self.plan():
            ready = request.computed + count == len(request.tokens)
            drafted.append(self.propose(request) if ready else [])
            request.tokens += drafted[-1]
            rows.append((request, count + len(drafted[-1])))
        parts = torch.split(self.compute(rows), [count for _, count in rows])
        for (request, count), drafts, x in zip(rows, drafted, parts, strict=True):
            del request.tokens[len(request.tokens) - len(drafts) :]
            if request.computed + count - len(drafts) < len(request.tokens):
                request.computed += count  # more of its prompt comes later
                continue
            self.verify(request, drafts, self.model.logits(x[-1 - len(drafts) :]))
        return rows

    def verify(self, request: Request, drafts: list[int], logits: Tensor) -> None:
        """Draws the model's own tokens, as long as the drafts before them were drawn too."""
        before = len(request.tokens)
        for scores, draft in zip(logits, [*drafts, None], strict=True):
            request.tokens.append(request.pick(scores, len(request.tokens)))
            if request.done or request.tokens[-1] != draft:
                break
        # What was computed for rejected drafts is overwritten, in both caches.
        request.computed = len(request.tokens) - 1
        cache = self.drafters[request.name]
        cache.length = min(cache.length, request.computed)
        self.passes += 1
        self.drafted += len(drafts)
        self.accepted += len(request.tokens) - before - 1
        if request.done:
            self.remove(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self.drafters.pop(request.name, None)


# ---- Lesson 9: structured output ----
DEAD = -1
Piece = tuple[str, int, int]
"""Characters, and how many of them may stand here: at least, at most."""


def machine(pieces: list[Piece]) -> tuple[list[list[int]], set[int]]:
    """Builds a machine that reads the pieces one after the other.

    Returns the next state by state and byte, and the states in which a text may end.
    """
    steps, begins = [[DEAD] * 256], {0}
    for alphabet, least, most in pieces:
        ends = set(begins) if least == 0 else set()
        for count in range(1, most + 1):
            steps.append([DEAD] * 256)
            for state in begins:
                for byte in alphabet.encode():
                    steps[state][byte] = len(steps) - 1
            begins = {len(steps) - 1}
            ends |= begins if count >= least else set()
        begins = ends
    return steps, begins


def token_table(
    steps: list[list[int]], ends: set[int], vocabulary: list[bytes], stop: int
) -> Tensor:
    """Returns the next state by state and token, int [states, vocab].

    Each token is walked once, from all states together. The stop token leads from ends to state 0.
    """
    moves = torch.tensor([*steps, [DEAD] * 256])  # the last row, which DEAD indexes, leads nowhere
    table = torch.full((len(steps), len(vocabulary)), DEAD)
    for token, text in enumerate(vocabulary):
        if text:
            states = torch.arange(len(steps))
            for byte in text:
                states = moves[states, byte]
            table[:, token] = states
    table[:, stop] = DEAD
    table[sorted(ends), stop] = 0
    return table


class Masked:
    """Picks one of the tokens that the machine's state allows, and moves on."""

    def __init__(self, table: Tensor, pick: Pick) -> None:
        self.table, self.pick, self.state = table, pick, 0

    def __call__(self, logits: Tensor, position: int) -> int:
        allowed = self.table[self.state] != DEAD
        token = self.pick(logits.masked_fill(~allowed, -math.inf), position)
        self.state = int(self.table[self.state, token])
        return token


# ---- Lesson 10: tensor and pipeline parallelism ----
import torch.distributed as dist

BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_INPUTS = ("o_proj", "down_proj")


class Shard(Model):
    """A rank's share of a model: some heads of each layer, and a part of the MLP's width."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        super().__init__(folder)
        self.heads, self.kv_heads = self.heads // world, self.kv_heads // world
        for name, weight in self.w.items():
            if any(part in name for part in BY_OUTPUTS):
                self.w[name] = weight.chunk(world)[rank]
            elif any(part in name for part in BY_INPUTS):
                self.w[name] = weight.chunk(world, dim=1)[rank].contiguous()

    def linear(self, x: Tensor, layer: int, name: str) -> Tensor:
        out = super().linear(x, layer, name)
        if f"{name}_proj".endswith(BY_INPUTS):
            dist.all_reduce(out)  # each rank has a partial sum of the whole output
        return out


def pipeline(model: Model, groups: list[list[int]], stages: int, count: int) -> list[str]:
    """Appends `count` tokens to each group's text, in stages that work at the same time.

    In a tick, each stage computes the group that has waited longest for it. Returns what each stage
    did: a character for each tick, the group's number or a dot.
    """
    share, ends = -(-model.layers // stages), [len(each) + count for each in groups]
    caches = [Cache(model, end) for end in ends]
    states, did = [torch.empty(0)] * len(groups), [""] * stages
    queues = [deque(range(len(groups))), *(deque[int]() for _ in range(stages - 1))]
    while any(queues):
        work = [queue.popleft() if queue else None for queue in queues]
        for stage, group in enumerate(work):
            did[stage] += "." if group is None else str(group)
            if group is None:
                continue
            text, cache = groups[group], caches[group]
            if stage == 0:
                states[group] = model.w["model.embed_tokens.weight"][text[cache.length :]]
            places = torch.arange(cache.length, len(text))
            for layer in range(share * stage, min(share * (stage + 1), model.layers)):
                states[group] = model.block(states[group], layer, places, cache)
            if stage + 1 == stages:
                cache.length = len(text)
                text.append(greedy(model.logits(states[group][-1]), len(text)))
            if len(text) < ends[group]:
                queues[(stage + 1) % stages].append(group)
    return did


# ---- Lesson 11: quantization ----
def quantize(x: Tensor, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
    """Rounds to multiples of a scale that `group` inputs share. 0: all inputs of a row share it.

    Returns int8 [rows, groups, inputs of a group], and scales [rows, groups, 1].
    """
    parts = x.view(len(x), -1, group or x.shape[1])
    most = 2 ** (bits - 1) - 1
    scale = parts.abs().amax(2, keepdim=True).clamp(min=1e-9) / most
    return (parts / scale).round().to(torch.int8), scale


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    return (values * scale).flatten(1)


class Quantized(Model):
    """A model whose layers keep their weights as integers and scales."""

    def __init__(self, folder: Path, bits: int, group: int = 64) -> None:
        super().__init__(folder)
        names = [name for name in self.w if "_proj" in name]
        self.packed = {name: quantize(self.w.pop(name), bits, group) for name in names}

    def linear(self, x: Tensor, layer: int, name: str) -> Tensor:
        return F.linear(x, dequantize(*self.packed[f"model.layers.{layer}.{name}_proj.weight"]))


def perplexity(model: Model, ids: list[int]) -> float:
    """Returns e to the mean of -log p(token), over all tokens but the first."""
    x = model.forward(torch.tensor(ids), torch.arange(len(ids)), NoCache())
    return float(F.cross_entropy(model.logits(x[:-1]), torch.tensor(ids[1:])).exp())


# ---- Lesson 12: gated delta nets ----
def delta_step(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """Writes a value under a key into each head's state, [heads, keys, values].

    The state fades by `decay`. Then the value stored under the key, which has unit length, moves
    towards v by `strength`. k: [heads, keys]; v: [heads, values]; the others: [heads].
    """
    state = decay[:, None, None] * state
    stored = torch.einsum("hkv,hk->hv", state, k)
    return state + torch.einsum("hk,hv->hkv", k, strength[:, None] * (v - stored))


class StateCache(PagedCache):
    """Blocks for layers with attention, and one state of fixed size for each other layer."""

    def __init__(self, model: Model, count: int, size: int = 16) -> None:
        super().__init__(model, count, size)
        self.states: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def close(self, name: str, tokens: list[int]) -> None:
        super().close(name, tokens)
        self.states = {key: state for key, state in self.states.items() if key[0] != name}


class Hybrid(Model):
    """A Qwen3.5: gated delta nets in three layers of four, attention in the others."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.key_heads: int = self.config["linear_num_key_heads"]
        self.key_dim: int = self.config["linear_key_head_dim"]
        self.value_dim: int = self.config["linear_value_head_dim"]
        rope = self.config["rope_parameters"]
        turned = int(self.head_dim * rope["partial_rotary_factor"])
        self.frequencies = rope["rope_theta"] ** -(torch.arange(0, turned, 2) / turned)
        for name in self.w:  # most norms of this family store their weight minus one
            if "norm" in name and "linear_attn" not in name:
                self.w[name] = self.w[name] + 1

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turns the first dimensions of each head, and leaves the others."""
        turned = 2 * len(self.frequencies)
        return torch.cat((super().rotate(x[..., :turned], positions), x[..., turned:]), dim=-1)

    def attention(self, x: Tensor, layer: int, positions: Tensor, memory: Any) -> Tensor:
        if f"model.layers.{layer}.linear_attn.A_log" in self.w:
            return self.delta(x, layer, memory)
        both = self.linear(x, layer, "self_attn.q").view(len(x), -1, 2 * self.head_dim)
        q, gate = both.chunk(2, dim=-1)
        k, v = (
            self.linear(x, layer, f"self_attn.{each}").view(len(x), -1, self.head_dim)
            for each in "kv"
        )
        q = self.rotate(self.norm(q, layer, "self_attn.q_norm"), positions)
        k = self.rotate(self.norm(k, layer, "self_attn.k_norm"), positions)
        seen = memory.attend(layer, q, k, v) * gate.sigmoid()
        return self.linear(seen.flatten(1), layer, "self_attn.o")

    def delta(self, x: Tensor, layer: int, memory: StateCache) -> Tensor:
        """Runs each row's tokens through its state, one after the other."""
        w = {n: self.w[f"model.layers.{layer}.linear_attn.{n}"] for n in ("A_log", "dt_bias")}
        mixed, z, a, b = (self.net(x, layer, f"in_proj_{each}") for each in ("qkv", "z", "a", "b"))
        decay, strength = (-w["A_log"].exp() * F.softplus(a + w["dt_bias"])).exp(), b.sigmoid()
        seen, at = [], 0
        for name, start, count in memory.rows:
            part = slice(at, at + count)
            out, memory.states[name, layer] = self.scan(
                mixed[part], decay[part], strength[part], layer,
                memory.states[name, layer] if start else None,
            )  # fmt: skip
            seen.append(out)
            at += count
        norm = self.w[f"model.layers.{layer}.linear_attn.norm.weight"]
        gated = self.rms_norm(torch.cat(seen), norm).flatten(1) * F.silu(z)
        return self.net(gated, layer, "out_proj")

    def net(self, x: Tensor, layer: int, name: str) -> Tensor:
        return F.linear(x, self.w[f"model.layers.{layer}.linear_attn.{name}.weight"])

    def scan(
        self, mixed: Tensor, decay: Tensor, strength: Tensor, layer: int,
        before: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Returns what a row's tokens read, [T, heads, values], and the row's state behind them."""
        taps = self.w[f"model.layers.{layer}.linear_attn.conv1d.weight"][:, 0]  # [channels, taps]
        heads, width = decay.shape[1], taps.shape[1]
        zeros = (
            torch.zeros(heads, self.key_dim, self.value_dim),
            mixed.new_zeros(width - 1, len(taps)),
        )
        state, inputs = before or zeros
        inputs = torch.cat((inputs, mixed))
        mixed = F.silu((inputs.unfold(0, width, 1) * taps).sum(-1))
        keys = self.key_heads * self.key_dim
        q, k, v = torch.split(mixed, [keys, keys, heads * self.value_dim], dim=1)
        share = heads // self.key_heads
        q, k = (
            F.normalize(each.view(len(mixed), -1, self.key_dim), dim=-1).repeat_interleave(share, 1)
            for each in (q, k)
        )
        v, out = v.view(len(mixed), heads, -1), []
        for token in range(len(mixed)):
            state = delta_step(state, k[token], v[token], decay[token], strength[token])
            out.append(torch.einsum("hkv,hk->hv", state, q[token]) / math.sqrt(self.key_dim))
        return torch.stack(out), (state, inputs[len(inputs) - width + 1 :])


# ---- Lesson 13: the server ----
import asyncio
import re
import sys
from collections.abc import AsyncIterator

from tokenizers import Tokenizer

HEAD = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


class Server:
    """Streams completions: one task turns the engine, and each connection has one of its own."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.lock, self.work, self.stepped = asyncio.Lock(), asyncio.Event(), asyncio.Event()

    async def drive(self) -> None:
        """Steps as long as there is work, in a thread: connections are served meanwhile."""
        while await self.work.wait():
            async with self.lock:  # a step, then whoever waits to add or remove a request
                await asyncio.to_thread(self.engine.step)
                if not self.engine.waiting and not self.engine.running:
                    self.work.clear()
            self.stepped.set()
            self.stepped = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"content-length: (\d+)", head.lower())
        body = json.loads(await reader.readexactly(int(size[1]) if size else 0))
        request = self.request(str(id(writer)), body)
        async with self.lock:
            self.engine.add(request)
            self.work.set()
        try:
            writer.write(HEAD)
            async for text in self.texts(request):
                event = json.dumps({"choices": [{"index": 0, "text": text}]})
                writer.write(f"data: {event}\n\n".encode())
                await writer.drain()
            writer.write(b"data: [DONE]\n\n")
        except ConnectionError:
            pass  # the client has left
        finally:
            async with self.lock:
                self.engine.remove(request)
            writer.close()

    def request(self, name: str, body: dict[str, Any]) -> Request:
        tokens = self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
        warmth, stop = body.get("temperature", 1.0), self.engine.model.config["eos_token_id"]
        pick = Sample(body.get("seed", 0), warmth) if warmth else greedy
        return Request(name, tokens, len(tokens) + body.get("max_tokens", 16), pick, stop)

    async def texts(self, request: Request) -> AsyncIterator[str]:
        """Yields what each step adds, and holds back a character that is not whole yet."""
        prompt, shown = len(request.tokens), ""
        while not request.done:
            await self.stepped.wait()
            text = self.tokenizer.decode(request.tokens[prompt:])
            if text != shown and (request.done or not text.endswith("\ufffd")):
                yield text.removeprefix(shown)
                shown = text


async def serve(folder: Path, port: int = 8000) -> None:
    model = Model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    server = Server(Engine(model, PrefixCache(model, count=512)), tokenizer)
    async with await asyncio.start_server(server.answer, "127.0.0.1", port):
        print(f"POST http://127.0.0.1:{port}/v1/completions")
        await server.drive()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
