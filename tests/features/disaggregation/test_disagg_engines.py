"""Two real engines, without HTTP: the writer computes prompts for the reader over real connections
and shared memory. Tokens equal those of a single engine."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.arrays import int32
from quire.config import EngineArgs, EngineConfig, SchedulerConfig
from quire.engine.builder import build_core
from quire.engine.loop.core import EngineCore
from quire.errors import ConfigError, PeerMismatchError, RequestError
from quire.features.disaggregation import loop as disagg_loop
from quire.features.disaggregation import pulls
from quire.features.disaggregation.calls import GRANT, HANDSHAKE, GrantRequest
from quire.features.disaggregation.facts import differences, facts_of
from quire.features.disaggregation.loop import DisaggLoop
from quire.features.disaggregation.messages import Grant, PromptRequest, Welcome
from quire.features.disaggregation.peer_list import PeerList
from quire.features.disaggregation.settings import read_settings
from quire.sampling_params import SamplingParams
from quire.server.args import ServerArgs
from tests.engine.test_hybrid_engine import HYBRID
from tests.features.speculation.test_speculation import DRAFT_SHAPE, EAGLE_SHAPE
from tests.tiny_engine import MAX_LEN, TINY, TINY_WINDOW, VOCAB, model_folder, random_prompts

SIZE = 8
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True, n=2),
    SamplingParams(temperature=0.7, seed=4, repetition_penalty=1.3, max_tokens=8, ignore_eos=True),
)
LATENT = {
    **TINY, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "num_key_value_heads": TINY["num_attention_heads"], "kv_lora_rank": 24, "q_lora_rank": 20,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "moe_intermediate_size": 64, "n_routed_experts": 6, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
PROMPTS = [prompt * 3 for prompt in random_prompts(3, 60, seed=5)]


def config_of(folder: Path, disagg: dict[str, Any] | None, **args: Any) -> EngineConfig:
    scheduler = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=32, max_model_len=MAX_LEN, steps_in_flight=2
    )
    return EngineConfig(
        args=EngineArgs(
            num_kv_blocks=200, load_format="dummy", seed=3, kv_peers=disagg, block_size=SIZE, **args
        ),
        model_path=str(folder),
        tokenizer_path=None,
        model_name="tiny",
        device="cpu",
        dtype="float32",
        block_size=SIZE,
        scheduler=scheduler,
        eos_token_ids=(5,),
        vocab_size=VOCAB,
        kv_cache_dtype=args.get("kv_cache_dtype", "float32"),
    )


class LocalPeer:
    """A client of the writer without HTTP; the writer's loop answers between two steps."""

    url, host, up, pulls = "local", "127.0.0.1", True, 0

    def __init__(self) -> None:
        self.memory = b""
        self.asked: queue.SimpleQueue[tuple[PromptRequest, Future[Grant]]] = queue.SimpleQueue()
        self.epoch = ""

    def ask(
        self,
        tokens: list[int],
        first: int,
        salt: str,
        traceparent: str = "",
        weights: str = "",
    ) -> Grant:
        answer: Future[Grant] = Future()
        asked = PromptRequest(tokens, first, "reader", self.epoch, salt, True, weights)
        self.asked.put((asked, answer))
        return answer.result(60)

    def failed(self, outcome: str) -> None:
        pass


class Pair:
    """A writer and a reader, stepped in turn."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, mode: str, **args: Any) -> None:
        self.peer = LocalPeer()
        ranks = args.pop("ranks", (1, 1))
        common = {"lease_timeout": 20.0, "remote_prefill_tokens": SIZE, "kv_transfer": mode}
        common["transport"] = args.pop("transport", "tcp")
        patch.setattr(PeerList, "choose", lambda *_: self.peer)
        self.writer = build_core(
            config_of(folder, {"role": "prefill", **common}, tensor_parallel_size=ranks[0], **args)
        )
        self.peer.memory = loop_of(self.writer)._memory
        reader = {"role": "decode", "peers": ["localhost"], **common}
        self.reader = build_core(config_of(folder, reader, tensor_parallel_size=ranks[1], **args))

    def serve(self) -> None:
        """Answers the reader's requests."""
        core = self.writer
        while not self.peer.asked.empty():
            asked, answer = self.peer.asked.get()
            request = GrantRequest(_of_now(asked, loop_of(core)))
            answer.set_result(core.call(GRANT, request).answer)

    def run(self) -> list[list[int]]:
        requests = start(self.reader)
        while self.reader.has_work():
            self.serve()
            self.writer.step()
            self.reader.step()
        for _ in range(1000):
            if not self.stats(self.writer).grants_open:
                break
            self.writer.step()
        return [request.output.tolist() for request in requests]

    def stats(self, core: EngineCore) -> Any:
        return core.stats().disagg

    def close(self) -> None:
        self.writer.shutdown()
        self.reader.shutdown()


def loop_of(core: EngineCore) -> DisaggLoop:
    (loop,) = (f for f in core._loop_features if isinstance(f, DisaggLoop))
    return loop


def _of_now(asked: PromptRequest, loop: DisaggLoop) -> PromptRequest:
    assert loop._exports is not None
    return msgspec.structs.replace(asked, epoch=loop._exports.epoch)


def start(core: EngineCore) -> list[Any]:
    return [
        request
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
        for request in core.add(str(i), int32(prompt), params, max_total=len(prompt) + 8)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    shapes = {"full": TINY, "window": TINY_WINDOW, "state": HYBRID, "latent": LATENT}
    shapes |= {"draft": DRAFT_SHAPE, "eagle3": EAGLE_SHAPE}
    return {name: model_folder(root / name, shape) for name, shape in shapes.items()}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pairs: list[Pair] = []

    def made(folder: Path, mode: str = "sync", **args: Any) -> Pair:
        pairs.append(Pair(folder, monkeypatch, mode, **args))
        return pairs[-1]

    yield made
    for pair in pairs:
        pair.close()


def alone(folder: Path, **args: Any) -> list[list[int]]:
    core = build_core(config_of(folder, None, **args))
    requests = start(core)
    while core.has_work():
        core.step()
    core.shutdown()
    return [request.output.tolist() for request in requests]


def check(pair: Pair, expected: list[list[int]]) -> None:
    assert pair.run() == expected
    stats = pair.stats(pair.reader)
    assert (stats.fetches, stats.local) == ({"done": 3}, 0)
    # A state is only known at the end of a block.
    unit = 1 if all(group.grows for group in pair.reader.scheduler.blocks.groups) else SIZE
    assert stats.remote_tokens == sum((len(prompt) - 1) // unit * unit for prompt in PROMPTS)
    assert pair.stats(pair.writer).grants == {"done": 3}
    for core in (pair.writer, pair.reader):
        assert not any(usage.used for usage in core.scheduler.blocks.usage())


@pytest.mark.parametrize(
    ("model", "mode", "kv"),
    [
        ("full", "sync", "float32"),
        ("full", "async", "int8"),
        ("window", "async", "float32"),
        ("state", "sync", "float32"),
        ("latent", "async", "int8"),
    ],
)
def test_tokens_are_those_of_one_engine(
    folders: dict[str, Path], make: Any, model: str, mode: str, kv: str
) -> None:
    expected = alone(folders[model], kv_cache_dtype=kv)
    check(make(folders[model], mode, kv_cache_dtype=kv), expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kv", ["float32", "int8", "fp8", "fp8_dynamic"])
@pytest.mark.parametrize("model", ["full", "window", "state", "latent"])
def test_every_family_in_every_format(
    folders: dict[str, Path], make: Any, model: str, kv: str, ranks: tuple[int, int]
) -> None:
    mode = "async" if ranks == (1, 1) else "sync"
    expected = alone(folders[model], kv_cache_dtype=kv)
    check(make(folders[model], mode, ranks=ranks, kv_cache_dtype=kv), expected)


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        ("full", (1, 2)),
        ("state", (2, 1)),
        pytest.param("full", (2, 1), marks=pytest.mark.slow),
        pytest.param("full", (1, 4), marks=pytest.mark.slow),
        pytest.param("state", (1, 2), marks=pytest.mark.slow),
        pytest.param("latent", (1, 2), marks=pytest.mark.slow),
    ],
)
def test_engines_of_different_ranks(
    folders: dict[str, Path], make: Any, model: str, ranks: tuple[int, int]
) -> None:
    """One engine of a process may have several ranks; `test_disagg.py` has pairs of servers."""
    check(make(folders[model], ranks=ranks), alone(folders[model]))


def blocks_of(core: EngineCore, tokens: list[int]) -> Iterator[torch.Tensor]:
    """Yields the contents of each KV group's tensors for a prompt."""
    manager = core.scheduler.blocks
    match = manager.match((0, ""), int32(tokens), len(tokens), whole_only=True)
    assert match.length == len(tokens)
    for group in manager.groups:
        ids = match.node.path(group.index, 0, match.whole)
        for tensor in core._executor.cache.block_tensors(group.index):  # type: ignore[attr-defined]
            yield tensor[ids.tolist()]


@pytest.mark.parametrize(
    ("model", "method", "mode", "ranks"),
    [
        ("full", "draft", "async", (1, 1)),
        ("full", "eagle3", "sync", (1, 2)),
        ("state", "mtp", "sync", (2, 1)),
        pytest.param("full", "draft", "sync", (2, 1), marks=pytest.mark.slow),
        pytest.param("state", "draft", "async", (1, 2), marks=pytest.mark.slow),
    ],
)
def test_draft_layers_and_models_receive_their_kv_too(
    folders: dict[str, Path], make: Any, model: str, method: str, mode: str, ranks: tuple[int, int]
) -> None:
    """Tokens equal those without drafts. With one rank per engine, the reader's KV also equals the
    writer's, including that of draft layers and models. A draft head's last pair is missing,
    because the writer does not know the token after it."""
    wanted: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method != "mtp":
        wanted["model"] = str(folders[method])
    pair = make(folders[model], mode, ranks=ranks, speculative=wanted)
    check(pair, alone(folders[model]))
    if ranks == (1, 1):
        tokens = PROMPTS[0][: (len(PROMPTS[0]) - 1) // SIZE * SIZE - SIZE]
        held = [blocks_of(core, tokens) for core in (pair.writer, pair.reader)]
        for there, here in zip(*held, strict=True):
            assert there.any()
            assert torch.equal(there, here)


def test_blocks_come_over_a_connection_where_memory_cannot_be_mapped(
    folders: dict[str, Path], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "map_memory", lambda handle: None)
    check(make(folders["full"]), alone(folders["full"]))


def test_a_writer_that_is_gone_leaves_a_request_to_its_own_engine(
    folders: dict[str, Path], make: Any
) -> None:
    pair = make(folders["full"])
    expected = alone(folders["full"])
    requests = start(pair.reader)
    while not pair.stats(pair.writer).grants_open:
        pair.reader.step()
        pair.serve()
    gone = threading.Thread(target=pair.writer.shutdown)
    gone.start()
    while pair.reader.has_work():
        while not pair.peer.asked.empty():
            pair.peer.asked.get()[1].set_exception(ConfigError("gone"))
        pair.reader.step()
    gone.join()
    assert [request.output.tolist() for request in requests] == expected
    stats = pair.stats(pair.reader)
    assert stats.local == 3
    assert not any(usage.used for usage in pair.reader.scheduler.blocks.usage())


def test_engines_that_do_not_match_say_both_sides_values(folders: dict[str, Path]) -> None:
    config = config_of(folders["full"], {"role": "prefill"})
    core = build_core(config)
    groups, sizes = core.capacity.groups, (10,)
    own = facts_of(config, groups, sizes, "tcp")
    other = facts_of(
        dataclasses.replace(config, block_size=16, kv_cache_dtype="int8"), groups, sizes, "nixl"
    )
    found = differences(own, other)
    assert found == [
        "transport: 'tcp' here, 'nixl' at the peer",
        "kv_cache_dtype: 'float32' here, 'int8' at the peer",
        "block_size: 8 here, 16 at the peer",
    ]
    with pytest.raises(PeerMismatchError, match="block_size: 8 here, 16 at the peer"):
        core.call(HANDSHAKE, other)
    loop = loop_of(core)
    assert isinstance(core.call(HANDSHAKE, loop._facts), Welcome)
    with pytest.raises(PeerMismatchError, match="started again"):
        core.call(GRANT, GrantRequest(PromptRequest([1] * 8, 0, "reader", "another")))
    for tokens, first in (([], 0), ([VOCAB] * 8, 0), ([-1] * 8, 0), ([1] * 15, 2)):
        asked = _of_now(PromptRequest(tokens, first, "reader", ""), loop)
        with pytest.raises(RequestError, match="tokens"):
            core.call(GRANT, GrantRequest(asked))
    core.shutdown()


def test_prompts_with_recurrent_states_are_whole_blocks(folders: dict[str, Path]) -> None:
    core = build_core(config_of(folders["state"], {"role": "prefill"}))
    asked = _of_now(PromptRequest([1] * 7, 0, "reader", ""), loop_of(core))
    with pytest.raises(RequestError, match="whole blocks of 8 tokens"):
        core.call(GRANT, GrantRequest(asked))
    core.shutdown()


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
    ],
)
def test_unsupported_features_and_roles_are_refused(
    folders: dict[str, Path], args: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        DisaggLoop(config_of(folders["full"], {"role": "prefill"}, **args))
    with pytest.raises(ConfigError, match="kv_peers"):
        disagg_loop.read_settings({"role": "router"})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"role": "prefill", "peer": ("localhost:1",)}, "uses no peers"),
        ({"role": "router"}, "role must be one of"),
        ({"peer": ("ftp://localhost",)}, "peer: .* is not an http address"),
        ({"transport": "rdma"}, "transport must be one of tcp, nixl, ipc, got 'rdma'"),
        ({"kv_transfer": "late"}, "kv_transfer must be one of"),
        ({"lease_timeout": 0.0}, "lease_timeout"),
        ({"kv_port": 70000}, "kv_port"),
        ({"role": "prefill", "kv_port": 8000, "port": 8000}, "is also the API's port"),
        ({"remote_prefill_tokens": 0}, "remote_prefill_tokens"),
        ({"role": "prefill", "data_parallel_size": 2}, "start several servers"),
        ({"transport": "ipc"}, "transport only applies to servers with peers"),
        ({"remote_prefill_tokens": 64}, "set peer, or role=prefill or decode"),
    ],
)
def test_conflicting_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ServerArgs(**settings)


def test_a_lease_longer_than_socket_timeouts_is_refused() -> None:
    """Otherwise the thread that accepts readers would end at the first connection."""
    with pytest.raises(ConfigError, match="lease_timeout must be at most"):
        read_settings({"role": "prefill", "lease_timeout": 1e7})


def test_a_server_without_peers_has_no_peer_settings() -> None:
    assert ServerArgs().kv_peers is None
    both = ServerArgs(peer=("localhost:1",), peer_key="key").kv_peers
    assert both is not None
    read = disagg_loop.read_settings(both)
    assert (read.grants, read.asks, read.peer_key) == (True, True, "key")


def test_weights_of_the_same_update(folders: dict[str, Path], make: Any) -> None:
    pair = make(folders["full"])
    for core in (pair.writer, pair.reader):
        core.scheduler.change_weights("a" * 32, retract=False)
    check(pair, alone(folders["full"]))


def test_weights_of_different_updates(folders: dict[str, Path], make: Any) -> None:
    core = make(folders["full"]).writer
    asked = PromptRequest([1] * SIZE, 0, "reader", "", weights="a" * 32)
    with pytest.raises(PeerMismatchError, match="update both with one id"):
        core.call(GRANT, GrantRequest(_of_now(asked, loop_of(core))))
    # Grants from before an update end with it.
    asked = msgspec.structs.replace(asked, weights="")
    core.call(GRANT, GrantRequest(_of_now(asked, loop_of(core))))
    core.scheduler.change_weights("a" * 32, retract=False)
    while core.has_work():
        core.step()
    assert core.stats().disagg.grants == {"refused": 1}
