"""Steps' outputs for each client, found by lane."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.arrays import int32
from quire.config import SchedulerConfig
from quire.engine.loop.core import EngineCore
from quire.engine.loop.messages import StepOutputs
from quire.engine.process.completions import Client, CompletionTable
from quire.plan import KVGroup
from quire.sampling_params import SamplingParams
from tests.fakes import FakeExecutor


def engine(**config: Any) -> EngineCore:
    executor = FakeExecutor([KVGroup(layers=(0,), tokens_per_block=4)], [config.pop("blocks", 64)])
    args = SimpleNamespace(seed=0, trace_dir=None, logprobs_mode="raw_logprobs")
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | config
    resolved = SimpleNamespace(args=args, scheduler=SchedulerConfig(**settings))
    return EngineCore(resolved, executor)  # type: ignore[arg-type]


class Clients:
    """Two clients of an engine, and the messages sent to them."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.table = CompletionTable(core.config.scheduler.max_num_seqs)
        self.clients = [Client(None, number) for number in (0, 5)]  # type: ignore[arg-type]
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.starts: list[tuple[int, int]] = []
        self.ends: list[tuple[int, int]] = []

    def add(self, client: int, handle: int, length: int, output: int, n: int = 1) -> None:
        owner = self.clients[client]
        prompt = int32([client * 100 + handle] * length)
        params = SamplingParams(n=n, prompt_logprobs=0 if handle == 8 else None)
        total = length + output
        requests = self.core.add(owner.request(handle), prompt, params, max_total=total)
        self.table.add(owner, handle, requests)

    def step(self) -> list[StepOutputs]:
        progress = self.core.step()
        if progress is None:
            return []
        sent = []
        for client, message in self.table.outputs(progress, self.clients):
            sent.append(message)
            at = 0
            for handle, count in zip(
                message.handles.tolist(), message.counts.tolist(), strict=True
            ):
                tokens = self.tokens.setdefault((client.number, handle), [])
                tokens += message.tokens[at : at + count].tolist()
                at += count
            self.starts += [(client.number, start.handle) for start in message.starts]
            self.ends += [(client.number, end.handle) for end in message.ends]
        return sent

    def drain(self) -> None:
        while self.core.has_work():
            self.step()


def test_each_client_gets_its_own() -> None:
    clients = Clients(engine())
    clients.add(0, 3, 5, 4, n=2)
    clients.add(1, 3, 20, 6)
    clients.add(1, 8, 6, 3)
    assert clients.clients[0].handles == {3: 2}
    clients.drain()
    lengths = {key: len(tokens) for key, tokens in clients.tokens.items()}
    assert lengths == {(0, 3): 4, (0, 4): 4, (5, 3): 6, (5, 8): 3}
    assert sorted(clients.starts) == sorted(clients.ends) == sorted(lengths)
    assert len(clients.table) == 0
    assert clients.clients[0].handles == clients.clients[1].handles == {}


def test_a_preempted_completion_starts_once() -> None:
    clients = Clients(engine(blocks=10))
    for handle in range(3):
        clients.add(0, 10 * handle, 6, 20)
    clients.drain()
    assert clients.core.stats().preemptions > 0
    assert sorted(clients.starts) == [(0, 0), (0, 10), (0, 20)]
    assert all(len(tokens) == 20 for tokens in clients.tokens.values())


def test_prompt_logprobs_come_with_their_handle() -> None:
    clients = Clients(engine())
    clients.add(0, 1, 6, 3)
    clients.add(1, 8, 6, 3)
    found = [pair for _ in range(12) for m in clients.step() for pair in m.prompt_logprobs]
    assert {handle for handle, _ in found} == {8}
    assert sum(len(part.positions) for _, part in found) == 5


def test_an_aborted_completion_is_forgotten() -> None:
    clients = Clients(engine())
    clients.add(0, 1, 6, 30, n=2)
    clients.step()
    for request in clients.core.abort(clients.clients[0].request(1), 1):
        assert clients.table.end(request).handle == 2
    assert clients.clients[0].handles == {1: 1}
    clients.drain()
    assert clients.ends == [(0, 1)]
    assert len(clients.table) == 0
