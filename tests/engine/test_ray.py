"""Ranks placed by Ray: the requested resources, and an engine on two machines, simulated by two
raylets."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.engine.process.replicas import environments
from quire.engine.ranks.ranks import check_ranks
from quire.errors import ConfigError, EngineDeadError
from quire.models import spec_from_config
from quire.quantization import Unquantized
from tests.tiny_engine import TINY

PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
PROMPTS = [f"Page {index} of a book" for index in range(6)]


def refusal(**settings: Any) -> str:
    args = EngineArgs(distributed_executor="ray", **settings)
    with pytest.raises(ConfigError) as error:
        check_ranks(args, "cpu", spec_from_config(TINY), Unquantized())
    return str(error.value)


def test_settings_with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Ray is not installed; install the extra 'ray'" in refusal(tensor_parallel_size=2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "there is one rank" in refusal()
    assert "device=cuda:1 must be left out" in refusal(tensor_parallel_size=2, device="cuda:1")
    assert "master_addr=10.0.0.1" in refusal(tensor_parallel_size=2, master_addr="10.0.0.1")
    with pytest.raises(ConfigError, match="one engine, not data_parallel_size=2"):
        environments(EngineArgs(distributed_executor="ray"), 2)
    with pytest.raises(ConfigError, match="distributed_executor must be one of process, ray"):
        EngineArgs(distributed_executor="slurm")  # type: ignore[arg-type]


def test_a_cluster_that_is_too_small() -> None:
    pytest.importorskip("ray")
    from quire.engine.ranks.ray_placement import Machine, missing_resources

    machines = [Machine("a", "10.0.0.1", 8), Machine("b", "10.0.0.2", 4)]
    assert missing_resources(machines, "a", "GPU", 4, 2) is None
    assert missing_resources(machines, "a", "GPU", 8, 2) == (
        "the engine needs 2 machines with 8 GPUs each, including this one; Ray's cluster "
        "has 10.0.0.1 (this one) with 8, 10.0.0.2 with 4"
    )
    assert missing_resources(machines, "b", "GPU", 8, 1) is not None
    assert "has no machine" in str(missing_resources([], "a", "GPU", 1, 1))


def test_gpus_that_ray_has_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from quire.engine.ranks.ray_placement import own_devices

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert own_devices(["2", "5"]) == ["cuda:2", "cuda:5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,2")
    assert own_devices(["2", "5"]) == ["cuda:2", "cuda:1"]
    with pytest.raises(ConfigError, match="hides 7"):
        own_devices(["2", "7"])


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs two raylets with one device each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_two_machines_of_a_cluster(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two machines give the tokens of one; an actor that is killed ends the engine, and the cluster
    has its devices back. A request for three machines fails. No worker imports from the current
    folder."""
    import ray

    from quire.engine.ranks import ray_placement

    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    found = []
    settings: dict[str, Any] = {"pipeline_parallel_size": 2, "nnodes": 2}
    for more in ({}, {**settings, "distributed_executor": "ray"}):
        llm = LLM(device="cpu", max_num_seqs=4, max_model_len=256, num_kv_blocks=32, **more)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert not (tmp_path / "ran").exists()
    assert ray.available_resources().get("CPU", 0) == 0
    (actor,) = [each for each in actors() if "run" in each]
    os.kill(int(actor.split()[0]), signal.SIGKILL)

    def go_on() -> None:
        for _ in range(10_000):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)

    with pytest.raises(EngineDeadError, match="rank 1, on another machine, has ended"):
        go_on()
    llm.shutdown()
    monkeypatch.setattr(ray_placement, "_JOIN_SECONDS", 0.0)
    with pytest.raises(ConfigError, match=r"3 machines with 1 CPU each .* \(this one\) with 1"):
        LLM(device="cpu", pipeline_parallel_size=3, nnodes=3, distributed_executor="ray")


def actors() -> list[str]:
    """Returns a line for each process of Ray's that is an actor of the engine."""
    lines = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                title = file.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if title.startswith("ray::RankActor"):
            lines.append(f"{pid} {title}")
    return lines
