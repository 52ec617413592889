"""`LLM`: offline generation, with the engine in the caller's process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from quire.config import EngineArgs
from quire.engine.builder import build_core, resolve
from quire.engine.core import EngineStats
from quire.engine.output import CompletionReader, PromptLogprobs, StreamUpdate
from quire.engine.tokenizer import Tokenizer
from quire.engine.validate import max_total, prompt_ids
from quire.errors import RequestError
from quire.outputs import CompletionOutput, RequestOutput
from quire.plan import Int32
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Progress, StepProgress

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

Message = Mapping[str, Any]

_IMPATIENT = 3
"""Interrupts after which one takes effect in the midst of a step."""


@dataclass(slots=True)
class _Job:
    """A request under way. `readers` follow the tokens of those that must be looked at as they
    come; the others' tokens are read once, at the end."""

    text: str | None
    ids: Int32
    params: SamplingParams
    output: RequestOutput
    requests: list[Request]
    readers: list[CompletionReader]
    about_prompt: PromptLogprobs | None
    open: int

    @property
    def followed(self) -> bool:
        p = self.params
        return bool(p.stop) or p.logprobs is not None or p.prompt_logprobs is not None


class LLM:
    """A model to generate with; keyword names are vLLM's.

    Args:
        model: a folder or hub id; None is the embedded model.
        **settings: any field of `EngineArgs`.

    Raises:
        ConfigError, ModelError: a setting is wrong, or the model cannot be loaded.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        config = resolve(EngineArgs.from_kwargs(model=model, **settings))
        self.config = config
        self._tokenizer = None
        if config.tokenizer_path is not None:
            self._tokenizer = Tokenizer.from_path(config.tokenizer_path)
        self._core = build_core(config)
        self._count = 0

    # -- what users call -----------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes all prompts, in as few steps as fit; outputs in the order of the prompts.

        Args:
            prompts: one prompt or many. A flat list of integers is one prompt.
            sampling_params: for all prompts, or one each; None: the defaults.
            use_tqdm: show a progress bar, on a terminal.
            priority: one each, lower first (scheduling_policy="priority").

        Raises:
            RequestError: a request is invalid. Nothing has run then.
            KeyboardInterrupt: between two steps, so that the engine is fit for the next call.
            EngineDeadError: an earlier call has failed in a step.
        """
        many = _as_list(prompts)
        params = _one_each(sampling_params, len(many), SamplingParams())
        priorities = [0] * len(many) if priority is None else list(priority)
        if len(priorities) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(priorities)} priorities", "priority")
        jobs = [self._job(prompt, p) for prompt, p in zip(many, params, strict=True)]
        with _interrupts_held() as let_interrupt:
            try:
                self._start(jobs, priorities)
                with _progress_bar(len(jobs), use_tqdm) as advance:
                    self._run(jobs, advance, let_interrupt)
            finally:
                # Nothing is left unless this was interrupted, or a request was refused.
                if not self._core.failed:
                    for job in jobs:
                        self._core.abort(job.output.request_id)
                    self._drain()
        return [job.output for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of {"role", "content"}), or many."""
        tokenizer = self.get_tokenizer()
        conversations: Sequence[Any] = messages
        if messages and isinstance(messages[0], Mapping):
            conversations = [messages]
        prompts = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            # The template has written the special tokens.
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """Raises RequestError with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise RequestError("the tokenizer was not loaded (skip_tokenizer_init)")
        return self._tokenizer

    def stats(self) -> EngineStats:
        return self._core.stats()

    def shutdown(self) -> None:
        """Gives the device's memory back. Idempotent."""
        self._core.shutdown()

    # -- jobs ----------------------------------------------------------------------------------

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        text, given = _read_prompt(prompt)
        ids = prompt_ids(given, params, self.config, self._tokenizer)
        self._count += 1
        listed = ids.tolist()
        outputs = [CompletionOutput(index) for index in range(params.n)]
        about = None
        if params.prompt_logprobs is not None:
            about = PromptLogprobs(self._tokenizer)
        return _Job(
            text=text,
            ids=ids,
            params=params,
            output=RequestOutput(str(self._count), text, listed, outputs),
            requests=[],
            readers=[CompletionReader(i, listed, params, self._tokenizer) for i in range(params.n)],
            about_prompt=about,
            open=params.n,
        )

    def _start(self, jobs: list[_Job], priorities: list[int]) -> None:
        for job, priority in zip(jobs, priorities, strict=True):
            job.requests = self._core.add(
                job.output.request_id,
                job.ids,
                job.params,
                max_total=max_total(len(job.ids), job.params, self.config),
                priority=priority,
            )
            for request in job.requests:
                request.state["job"] = job

    def _run(
        self, jobs: list[_Job], advance: Callable[[], None], let_interrupt: Callable[[], None]
    ) -> None:
        left = len(jobs)
        followed = any(job.followed for job in jobs)
        while left:
            let_interrupt()
            progress = self._core.step()
            if progress is None:
                raise RequestError("the engine has requests that it cannot run")
            for item in _worth_a_look(progress, followed):
                job: _Job = item.request.state["job"]
                if self._look(job, item) and not job.open:
                    left -= 1
                    job.output.finished = True
                    advance()

    def _look(self, job: _Job, item: Progress) -> bool:
        """Reads what came for one completion; whether that ended it."""
        request = item.request
        reader = job.readers[request.sample_index]
        if reader.finished or not (job.followed or item.finished):
            return False
        if item.prompt_logprobs is not None and job.about_prompt is not None:
            job.about_prompt.feed(item.prompt_logprobs)
        tokens = item.new_tokens if job.followed else request.output
        reason = str(request.finish_reason) if item.finished else None
        logprobs = () if item.logprobs is None else (item.logprobs,)
        if not len(tokens) and reason is None:
            return False
        update = reader.feed(tokens.tolist(), logprobs, reason, item.stop_token)
        _add(job.output.outputs[request.sample_index], update)
        job.output.num_cached_tokens = job.requests[0].num_cached_tokens
        job.output.metrics = job.requests[0].state["times"]
        if not reader.finished:
            return False
        if reader.ended_by_text and not item.finished:
            self._core.abort(job.output.request_id, request.sample_index)
        job.open -= 1
        if job.about_prompt is not None:
            job.output.prompt_logprobs = job.about_prompt.entries
        return True

    def _drain(self) -> None:
        while self._core.has_work():
            self._core.step()


def _worth_a_look(progress: StepProgress, followed: bool) -> Iterator[Progress]:
    """With no one to follow, only those that ended: a step then costs nothing per request."""
    if followed:
        yield from progress
    else:
        for place in progress.finished:
            yield progress[place]


def _add(output: CompletionOutput, update: StreamUpdate) -> None:
    output.text += update.text
    output.token_ids += update.token_ids
    if update.logprobs is not None:
        output.logprobs = [*(output.logprobs or ()), *update.logprobs]
    output.finish_reason = update.finish_reason
    output.stop_reason = update.stop_reason


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype != object:
        return [prompts]
    many: list[Any] = list(prompts)
    if many and all(isinstance(item, (int, np.integer)) for item in many):
        return [many]
    return many


def _read_prompt(prompt: Prompt) -> tuple[str | None, str | Sequence[int]]:
    """(its text, what to tokenize or run)."""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise RequestError(
                'a prompt given as a dict has "prompt" or "prompt_token_ids", not '
                f"{', '.join(sorted(map(str, unknown))) or 'nothing'}",
                "prompt",
            )
        text = prompt.get("prompt")
        ids = prompt.get("prompt_token_ids")
        return text, text if ids is None else ids  # type: ignore[return-value]
    return (prompt if isinstance(prompt, str) else None), prompt


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"{count} prompts but {len(params)} sampling parameters", "sampling_params"
        )
    return list(params)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back but where the function it gives is called: in the midst of a step it would
    leave scheduler and device at odds. The third one does not wait."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    held = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        held += 1
        if held >= _IMPATIENT:
            previous(number, frame)

    def let() -> None:
        nonlocal held
        if held:
            held = 0
            previous(signal.SIGINT, None)

    signal.signal(signal.SIGINT, hold)
    try:
        yield let
    finally:
        signal.signal(signal.SIGINT, previous)
    let()


@contextlib.contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Callable[[], None]]:
    """A function to call for each request that is done."""
    if not wanted:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    columns = "Requests", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
