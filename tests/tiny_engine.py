"""A tiny random model run by the real scheduler and the real runner, without processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.arrays import Int32, int32
from quire.config import EngineArgs, EngineConfig, SchedulerConfig
from quire.engine.loop.features import features_at_start, hooks_of
from quire.engine.ranks.workers import WorkerExecutor
from quire.features.speculation.feature import open_speculation
from quire.plan import StepPlan
from quire.request import Request
from quire.runner import Hook, ModelRunner
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, Scheduler
from quire.scheduler.progress import StepProgress

VOCAB = 128
MAX_LEN = 256

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
    "torch_dtype": "float32",
}

TINY_EXPERTS = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

TINY_WINDOW = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 20,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "torch_dtype": "float32",
}


def model_folder(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Job:
    prompt: Sequence[int]
    params: SamplingParams
    seed: int = 0
    priority: int = 0


class TinyEngine:
    """The engine's loop in its plainest form."""

    def __init__(
        self,
        folder: Path,
        *,
        depth: int = 1,
        budget: int = 256,
        lanes: int = 8,
        blocks: int = 200,
        prefix_caching: bool = True,
        policy: str = "fcfs",
        hooks: Sequence[Hook] = (),
        world: int = 1,
        stages: int = 1,
        timeout: float | None = None,
        features: Sequence[Feature] = (),
        dtype: str = "float32",
        device: str = "cpu",
        deterministic: bool = False,
        enforce_eager: bool = False,
        complete: bool = True,
        speculative: dict[str, Any] | None = None,
        make_executor: Callable[[EngineConfig, Sequence[Hook]], Any] | None = None,
    ) -> None:
        self.lanes = lanes
        scheduler = SchedulerConfig(
            max_num_seqs=lanes,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            steps_in_flight=depth,
            pipeline_depth=stages,
            enable_prefix_caching=prefix_caching,
            policy=policy,  # type: ignore[arg-type]
        )
        config = EngineConfig(
            args=EngineArgs(
                num_kv_blocks=blocks,
                load_format="dummy",
                seed=3,
                deterministic=deterministic,
                enforce_eager=enforce_eager,
                speculative=speculative,
                pipeline_parallel_size=stages,
            ),
            model_path=str(folder),
            tokenizer_path=None,
            model_name="tiny",
            device=device,
            dtype=dtype,
            block_size=8,
            scheduler=scheduler,
            eos_token_ids=(5,),
            vocab_size=VOCAB,
        )
        self.depth = depth
        entries = features_at_start(config, complete=complete)
        hooks = [*hooks_of(entries, config), *hooks]
        self.executor: Any
        if make_executor is not None:
            self.executor = make_executor(config, hooks)
        elif world == 1:
            self.executor = self.runner = ModelRunner(config, hooks=hooks)
        else:
            self.executor = WorkerExecutor(config, hooks=hooks, world=world, timeout=timeout)
            self.runner = self.executor.local
        capacity = self.executor.start()
        if speculative is not None:
            # Without measured costs, drafts count as free, so there are many.
            free = msgspec.structs.replace(capacity, step_seconds={})
            drafting = open_speculation(config).start(self.executor, free)
            features = [*features, *([] if drafting is None else [drafting])]
        self.features = features
        self.scheduler = Scheduler(scheduler, capacity, features)
        self.plans: list[StepPlan] = []
        self.progress: list[StepProgress] = []

    def submit_masks(self, step_id: int, masks: Mapping[int, Int32]) -> None:
        """Submits the masks of a step's GATED rows: by lane, int32 [lines, words]."""
        inputs = self.executor.host_inputs()
        starts = inputs.first_lines(step_id, int32(list(masks))).tolist()
        for start, (lane, mask) in zip(starts, masks.items(), strict=True):
            inputs.buffer()[start : start + len(mask)] = mask
            inputs.put(step_id, lane)

    def add(self, name: str, job: Job) -> list[Request]:
        requests: list[Request] = []
        for index in range(job.params.n):
            request = Request(
                f"{name}-{index}",
                int32(job.prompt),
                job.params,
                max_total=min(MAX_LEN, len(job.prompt) + (job.params.max_tokens or MAX_LEN)),
                priority=job.priority,
                seed=job.seed,
                sample_index=index,
                leader=requests[0] if requests else None,
            )
            self.scheduler.add(request)
            requests.append(request)
        return requests

    def step(self) -> None:
        while self.scheduler.num_in_flight < self.depth:
            plan = self.scheduler.plan()
            if plan is None:
                break
            self.plans.append(plan)
            self.executor.submit(plan)
        if self.scheduler.num_in_flight:
            self.progress.append(self.scheduler.update(self.executor.collect()))

    def drain(self) -> None:
        while self.scheduler.has_work():
            self.step()

    def run(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Runs all jobs together; returns the outputs of each job's completions in order."""
        requests = [r for i, job in enumerate(jobs) for r in self.add(str(i), job)]
        self.drain()
        stats = self.scheduler.stats()
        assert stats.blocks_used == [0] * len(stats.blocks_used)
        return [request.output.tolist() for request in requests]


def random_prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(6, VOCAB, draw.integers(2, longest)).tolist() for _ in range(count)]
