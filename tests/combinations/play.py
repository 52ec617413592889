"""Engines driven step by step, and the results of their requests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config import EngineArgs, EngineConfig
from quire.engine.builder import build_core, resolve
from quire.engine.loop.core import EngineCore
from quire.engine.loop.features import features_at_start, hooks_of, open_loop
from quire.engine.loop.output import CompletionReader, PromptLogprobCollector
from quire.engine.loop.prompts import max_total, prompt_ids
from quire.engine.ranks.workers import Ranks
from quire.errors import RequestError
from quire.features.kv_events.engine_load import load_of
from quire.features.kv_events.feature import KVEventFeature
from quire.features.kv_events.messages import EVENT_HASH_BYTES
from quire.features.lora.calls import LOAD, LoadAdapter
from quire.features.speculation.draft_count import StepCosts
from quire.features.speculation.feature import SpeculationFeature
from quire.request import Request
from quire.scheduler.order import Order
from quire.text.tokenizer import Tokenizer
from tests.brain import check_scheduler, nodes_of
from tests.combinations.draw import Asked, Setting
from tests.combinations.models import ADAPTERS, LENGTH, Checkpoints, eagle_head
from tests.local_stages import LocalStages

Alternatives = dict[int, tuple[float, int | None]]
"""By token, its log-probability and rank."""
_PATIENCE = 60.0
"""Seconds without any news after which an engine counts as stuck."""


@dataclass
class Choice:
    """A completion. finish: its finish reason, "error" if it failed, None while it runs."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop: int | str | None = None
    logprobs: list[Alternatives] | None = None


@dataclass
class Answer:
    """The results of a request. refused: the error on arrival. failure: the error that ended it.
    vector: the vector, if it asked for one."""

    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[Alternatives | None] | None = None
    cached: int = 0
    refused: str = ""
    failure: str = ""
    vector: list[float] | None = None


def _plainly(entries: Sequence[Any]) -> list[Any]:
    return [
        None if entry is None else {id: (one.logprob, one.rank) for id, one in entry.items()}
        for entry in entries
    ]


class Job:
    """A request under way, read as a client reads it."""

    def __init__(self, asked: Asked, requests: list[Request], tokenizer: Tokenizer) -> None:
        self.requests = requests
        params = asked.params
        self._readers = [
            CompletionReader(i, asked.prompt, params, tokenizer) for i in range(params.n)
        ]
        self._about_prompt = None
        if params.prompt_logprobs is not None:
            self._about_prompt = PromptLogprobCollector(tokenizer)
        self._answer = Answer([Choice() for _ in range(params.n)])

    @property
    def name(self) -> str:
        return self.requests[0].request_id.rpartition("/")[0]

    @property
    def answer(self) -> Answer:
        if self._about_prompt is not None:
            self._answer.prompt_logprobs = _plainly(self._about_prompt.entries)
        self._answer.cached = self.requests[0].num_cached_tokens
        return self._answer

    def read(self, item: Any) -> bool:
        """Handles a step's results. Returns whether a stop string ended a completion that still
        runs."""
        if item.pooled is not None:
            self._answer.vector = item.pooled.tolist()
        if self._about_prompt is not None and item.prompt_logprobs is not None:
            self._about_prompt.feed(item.prompt_logprobs)
        reason = str(item.request.finish_reason) if item.finished else None
        logprobs = () if item.logprobs is None else (item.logprobs,)
        index, tokens = item.request.sample_index, item.new_tokens.tolist()
        self._feed(index, tokens, logprobs, reason, item.stop_token)
        return self._readers[index].ended_by_text and not item.finished

    def fail(self, index: int, error: Exception) -> None:
        self._feed(index, [], (), "error", None)
        self._answer.failure = str(error)

    def _feed(
        self, index: int, tokens: list[int], logprobs: Any, reason: str | None, stop: int | None
    ) -> None:
        reader, choice = self._readers[index], self._answer.choices[index]
        if reader.finished or (not tokens and reason is None):
            return
        update = reader.feed(tokens, logprobs, reason, stop)
        choice.tokens += update.token_ids
        choice.text += update.text
        choice.finish, choice.stop = update.finish_reason, update.stop_reason
        if update.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + _plainly(update.logprobs)


class Engine:
    """An engine's loop, driven from outside."""

    def __init__(self, setting: Setting, core: EngineCore) -> None:
        self.setting = setting
        self.core = core
        self._tokenizer = Tokenizer.from_path(core.config.model_path)
        self._count = 0
        self._events: KVEventFeature | None = None

    @classmethod
    def plain(cls, checkpoints: Checkpoints, setting: Setting, *, adapters: bool) -> Engine:
        """Builds an engine without a setting's features, which gives the same tokens."""
        config = _config(
            checkpoints, setting, enable_prefix_caching=False, num_kv_blocks=200, max_num_seqs=8,
            enable_lora=adapters, max_loras=len(ADAPTERS),
        )  # fmt: skip
        made = cls(setting, build_core(config, complete=False))
        made._load_adapters(checkpoints)
        return made

    @classmethod
    def drawn(cls, checkpoints: Checkpoints, setting: Setting, folder: Path) -> Engine:
        """Builds the engine of a setting. folder: for files of its own."""
        given = dict(setting.others)
        if "disk_cache" in given:
            given["disk_cache"] = str(folder / "disk")
        if setting.speculative in ("draft", "auto"):
            draft = str(checkpoints.draft(setting.family))
            given["speculative"] = {**given["speculative"], "model": draft}
        elif setting.speculative == "eagle3":
            head = str(eagle_head(checkpoints.folder))
            given["speculative"] = {**given["speculative"], "model": head}
        if setting.stages > 1:
            given["pipeline_parallel_size"] = setting.stages
        config = _config(checkpoints, setting, **given)
        if setting.stages > 1:
            made = cls(setting, _local_stages(config))
        else:
            made = cls(setting, build_core(config, complete=False, server=setting.tenants))
            found = [f for f in made.core._loop_features if isinstance(f, KVEventFeature)]
            made._events = found[0] if found else KVEventFeature()
            if not found:
                made.core.scheduler.add_feature(made._events)
                made.core._loop_features.append(made._events)
            made._events.events("", 0, load_of(made.core, 0.0))
        for feature in made.core._loop_features:
            if isinstance(feature, SpeculationFeature):
                feature._costs = StepCosts({})
        made._load_adapters(checkpoints)
        return made

    def _load_adapters(self, checkpoints: Checkpoints) -> None:
        if not self.core.config.args.enable_lora:
            return
        for name in ADAPTERS:
            path = str(checkpoints.adapter(self.setting.family, name))
            answer = self.core.call(LOAD, LoadAdapter(name, path))
            while not answer.done():
                self.core.step()
            answer.result()

    # -- requests ------------------------------------------------------------------------------

    def play(
        self, asked: Sequence[Asked], *, checks: bool = False, forgets: Collection[int] = ()
    ) -> list[Answer]:
        """Runs requests until they end. checks: whether to check the scheduler after each step.
        forgets: steps before which the prefix cache is reset."""
        core = self.core
        waiting = sorted(range(len(asked)), key=lambda i: asked[i].arrives)
        jobs: dict[int, Job] = {}
        answers = [Answer() for _ in asked]
        leaving: list[tuple[int, int]] = []
        step, news = 0, time.monotonic()
        while waiting or core.has_work():
            if not core.has_work():
                step = max(step, asked[waiting[0]].arrives)
            while waiting and asked[waiting[0]].arrives <= step:
                i = waiting.pop(0)
                try:
                    jobs[i] = self._add(asked[i])
                except RequestError as error:
                    answers[i].refused = str(error)
                    continue
                leaves = asked[i].leaves
                if leaves is not None:
                    leaving.append((step + leaves, i))
            for entry in [entry for entry in leaving if entry[0] <= step]:
                leaving.remove(entry)
                core.abort(jobs[entry[1]].name, asked[entry[1]].whose)
            if step in forgets:
                core.scheduler.reset_prefix_cache()
            if self._step(list(jobs.values())):
                news = time.monotonic()
            assert time.monotonic() - news < _PATIENCE, "the engine is stuck"
            if checks:
                check_scheduler(core.scheduler)
            step += 1
        for i, job in jobs.items():
            answers[i] = job.answer
        return answers

    def _add(self, asked: Asked) -> Job:
        core, params = self.core, asked.params
        ids = prompt_ids(asked.prompt, params, core.config, self._tokenizer)
        self._count += 1
        requests = core.add(
            f"r{self._count}", ids, params, max_total=max_total(len(ids), params, core.config),
            priority=asked.priority, pooling=asked.pooling, cache_salt=asked.salt,
            adapter=asked.adapter, tenant=asked.tenant,
        )  # fmt: skip
        return Job(asked, requests, self._tokenizer)

    def _step(self, jobs: list[Job]) -> bool:
        """Runs a step; returns whether anything happened."""
        progress = self.core.step()
        owners = {request.request_id: job for job in jobs for request in job.requests}
        failures = self.core.take_failures()
        for request, error in failures:
            owners[request.request_id].fail(request.sample_index, error)
        if progress is None:
            return bool(failures)
        for item in progress:
            job = owners[item.request.request_id]
            if job.read(item):
                self.core.abort(job.name, item.request.sample_index)
        return True

    # -- the end -------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Checks that only the prefix tree holds blocks."""
        core, scheduler = self.core, self.core.scheduler
        core.step()  # news of requests that are gone
        assert not core.has_work()
        assert not core.waits
        check_scheduler(scheduler)
        stats = core.stats()
        assert (stats.running, stats.waiting) == (0, 0), stats
        assert not any(stats.blocks_used), stats.blocks_used
        held = core._siblings, core._failures, scheduler._requests, scheduler._detached
        assert not any(held), held
        assert not scheduler._waiting._siblings
        assert len(scheduler._waiting) == 0
        assert not scheduler.blocks.loading
        assert scheduler._lanes.num_free == core.config.scheduler.max_num_seqs
        calls = [call for calls in scheduler._features._calls.values() for call in calls]
        for feature in {*core._loop_features, *(call.__self__ for call in calls)}:
            check_feature(feature)
        self._check_events()

    def _check_events(self) -> None:
        """Checks the reported cache events against the cache's contents."""
        blocks = self.core.scheduler.blocks
        if self._events is None or not blocks.caching:
            return
        size = blocks.block_size
        held = {
            node.block_hash(place, 4 * size)[:EVENT_HASH_BYTES]
            for node in nodes_of(blocks.tree)
            for place in range(node.tokens // size)
        }
        told = set(self._events._held)
        assert told == held, f"told {len(told)}, held {len(held)}, both {len(told & held)}"

    def check_empty(self) -> None:
        """Checks that all blocks are free after a reset of the prefix cache."""
        scheduler = self.core.scheduler
        assert scheduler.reset_prefix_cache()
        check_scheduler(scheduler)
        stats = self.core.stats()
        assert stats.blocks_free == stats.blocks_total, (stats.blocks_free, stats.blocks_total)
        assert scheduler.blocks.tree.num_nodes == 0

    def shutdown(self) -> None:
        self.core.shutdown()


def _config(checkpoints: Checkpoints, setting: Setting, **given: Any) -> EngineConfig:
    model = str(checkpoints.model(setting.family))
    numbers = {"device": "cpu", "max_model_len": LENGTH, **setting.numbers}
    config = resolve(EngineArgs(model=model, **numbers, **given))
    stored = "auto" if config.args.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return dataclasses.replace(config, dtype=setting.dtype, kv_cache_dtype=stored)


def _local_stages(config: EngineConfig) -> EngineCore:
    """Builds an engine whose pipeline's stages are in this process."""
    entries = features_at_start(config, complete=True)
    executor = LocalStages(config, hooks_of(entries, config))
    opened = [open_loop(entry, config) for entry in entries]
    features = [feature for feature in opened if not isinstance(feature, Ranks)]
    order = Order(config.scheduler)
    return EngineCore(config, executor, loop_features=features, order=order)


_HELD = {
    "GrammarFeature": (
        "_masked",
        "_by_key",
        "_claims",
        "_held",
        "_compiling",
        "_checks",
        "_ready",
        "_failed",
    ),
    "AdapterFeature": ("_bound", "_waiting", "_readings", "_fetching", "_load"),
    "OffloadFeature": ("_wanted", "_jobs", "_queue"),
    "SpeculationFeature": ("_in_flight",),
    "KVEventFeature": ("_announced",),
}
"""By feature, what holds something of requests."""


def check_feature(feature: Any) -> None:
    """Checks that a feature keeps no state of finished requests."""
    kind = type(feature).__name__
    for name in _HELD.get(kind, ()):
        assert not getattr(feature, name), f"{kind}.{name}: {getattr(feature, name)}"
    if kind == "GrammarFeature":
        assert not feature._gated.any(), "a lane is gated"
        assert not any(feature._lanes), "a lane has a grammar"
    if kind == "AdapterFeature":
        assert not any(slot.users for slot in feature._slots._slots)
    if kind == "OffloadFeature":
        for tier in feature._tiers.values():
            held = tier.arriving, tier.places, tier.spilling, tier.host._pinned, tier.host._arriving
            assert not any(held), held
