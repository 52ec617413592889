"""`LLM`: offline generation, with the engine in the caller's process."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.arrays import Int32
from quire.config import EngineArgs
from quire.engine.builder import build_core, resolve
from quire.engine.loop.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from quire.engine.loop.embedding import embed_all
from quire.engine.loop.features import keyword_options, method_of_feature, open_prompt_reader
from quire.engine.loop.output import (
    CompletionReader,
    CompletionUpdate,
    PromptLogprobCollector,
    completion_readers,
    cut_runs,
)
from quire.engine.loop.prompts import (
    Prompt,
    as_list,
    chat_prompts,
    max_total,
    one_each,
    place_parts,
    prompt_ids,
    prompt_parts,
    read_prompt,
)
from quire.engine.loop.terminal import interrupts_held, request_bar
from quire.engine.loop.text_scores import classify_all, paired, score_all
from quire.errors import RequestError, generates_nothing_error, integer
from quire.features.call import PromptInputs, PromptReader, split_options
from quire.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.request import Request, RequestOptions
from quire.sampling_params import SamplingParams
from quire.scheduler import RequestProgress, StepProgress
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.loop.stats import EngineStats
    from quire.features.lora import LoRARequest

Message = Mapping[str, Any]


@dataclass(slots=True)
class _Job:
    """A prompt of a call, with its completions.

    Attributes:
        requests: the engine's requests, one per completion.
        readers: turn each completion's tokens into text. If the job is not `followed`, they read
            all tokens at the end.
        inputs: the parts of the prompt that are no text, or None.
        about_prompt: collects the prompt's log-probabilities, or None.
        open: number of unfinished completions.
    """

    text: str | None
    ids: Int32
    params: SamplingParams
    output: RequestOutput
    requests: list[Request]
    readers: list[CompletionReader]
    inputs: PromptInputs | None
    about_prompt: PromptLogprobCollector | None
    open: int

    @property
    def followed(self) -> bool:
        """Whether tokens must be read in the step that gives them."""
        p = self.params
        scored = p.logprobs is not None or p.prompt_logprobs is not None
        return bool(p.stop) or scored or p.return_sampling_info or p.return_routed_experts


class LLM:
    """A model to generate with; keyword names are vLLM's.

    Args:
        model: a folder or hub id; None is the embedded model.
        **settings: any field of `EngineArgs`.

    Raises:
        ConfigError, ModelError: a setting is wrong, or the model cannot be loaded.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.config = config = resolve(EngineArgs.from_kwargs(model=model, **settings))
        path = config.tokenizer_path
        self._tokenizer = None if path is None else Tokenizer.from_path(path)
        self._core = build_core(config, complete=False)
        # At the interpreter's end the processes of further ranks end by themselves.
        weakref.finalize(self, self._core.shutdown).atexit = False
        self._count = 0

    # -- what users call -----------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Completes all prompts, in as few steps as fit; outputs in the order of the prompts.

        Args:
            prompts: one prompt or many. A flat list of integers is one prompt. A dict may have
                images: {"prompt": text, "multi_modal_data": {"image": [...]}}.
            sampling_params: one for all prompts, or one for each. None means the defaults.
            use_tqdm: whether to show a progress bar on a terminal.
            priority: one for each prompt, lower first (scheduling_policy="priority").
            lora_request: an adapter for all prompts. A sequence has one or None for each
                (enable_lora).

        Raises:
            RequestError: a request is invalid. Then all requests end.
            KeyboardInterrupt: between two steps, so that the engine is fit for the next call.
            EngineDeadError: an earlier call has failed in a step.
        """
        many = as_list(prompts)
        params = one_each(sampling_params, len(many), SamplingParams())
        priorities = [0] * len(many) if priority is None else list(priority)
        for each in priorities:
            integer("priority", each, -(2**31), 2**31 - 1)
        if len(priorities) != len(many):
            raise RequestError(
                f"priority has {len(priorities)} entries for {len(many)} prompts", "priority"
            )
        options = keyword_options(self._core, len(many), lora_request=lora_request)
        jobs = [self._job(prompt, p) for prompt, p in zip(many, params, strict=True)]
        with self._requests([job.output.request_id for job in jobs]) as let_interrupt:
            self._start(jobs, priorities, options)
            with _progress_bar(len(jobs), use_tqdm) as advance:
                self._run(jobs, advance, let_interrupt)
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
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of {"role", "content"}), or many.

        Calls of tools are in the text, as the model writes them.

        Args:
            messages: one conversation or many.
            sampling_params: for all conversations, or one each; None: the defaults.
            use_tqdm: show a progress bar, on a terminal.
            add_generation_prompt: end each prompt with the header of an answer.
            chat_template: a Jinja template in place of the model's.
            chat_template_kwargs: further variables of the template.
            tools: tools that the template lists, in OpenAI's shape.

        Raises:
            RequestError, KeyboardInterrupt, EngineDeadError: as `generate`.
        """
        if self.config.encoder:
            raise generates_nothing_error()
        variables = {**({"tools": tools} if tools else {}), **(chat_template_kwargs or {})}
        prompts = chat_prompts(
            self.get_tokenizer(), messages, add_generation_prompt, chat_template, variables
        )
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Finds the likeliest continuations of each prompt, in the order of the prompts.

        Raises:
            RequestError, KeyboardInterrupt, EngineDeadError: as `generate`.
        """
        run = functools.partial(self.generate, use_tqdm=False)
        return beam_search(run, self.config, self._tokenizer, as_list(prompts), params)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Turns each prompt into a vector, in the order of the prompts.

        Raises:
            RequestError: a request is invalid. Then no request has run.
            KeyboardInterrupt, EngineDeadError: as `generate`.
        """
        many = as_list(prompts)
        named = self._named(many)
        with self._requests([*named]) as let_interrupt, _progress_bar(len(many), use_tqdm) as done:
            return embed_all(
                self._core, self._tokenizer, named, pooling_params, let_interrupt, done
            )

    def classify(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """Classifies each prompt, with a model that has a classification head.

        Raises:
            RequestError: a request is invalid, or the model has no such head. No request has run.
            KeyboardInterrupt, EngineDeadError: as `generate`.
        """
        many = as_list(prompts)
        named = self._named(many)
        with self._requests([*named]) as let_interrupt, _progress_bar(len(many), use_tqdm) as done:
            return classify_all(self._core, self._tokenizer, named, let_interrupt, done)

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of texts, in order.

        A reranker reads both texts of a pair. Other models give the similarity of their vectors.

        Args:
            data_1: one text for all pairs, or one for each.
            data_2: the other texts.
            use_tqdm: whether to show a progress bar on a terminal.

        Raises:
            RequestError: a request is invalid. Then no request has run.
            KeyboardInterrupt, EngineDeadError: as `generate`.
        """
        named = self._named(paired(data_1, data_2))
        with self._requests([*named]) as let_interrupt, _progress_bar(len(named), use_tqdm) as done:
            return score_all(self._core, self._tokenizer, named, let_interrupt, done)

    def _named(self, items: Sequence[Any]) -> dict[str, Any]:
        """Returns items by new request ids."""
        named = {str(self._count + place): each for place, each in enumerate(items, 1)}
        self._count += len(items)
        return named

    def update_weights(
        self,
        source: str | Path | Iterable[tuple[str, Any]],
        *,
        mode: Literal["wait", "keep", "abort", "retract"] = "wait",
        label: str = "",
        id: str = "",
    ) -> int:
        """Writes new weights in place. Process, captured programs and KV stay.

        Args:
            source: pairs of a tensor's name in the checkpoint and the tensor, or a folder of
                safetensors files. Tensors that it lacks do not change.
            mode: what happens to requests that run:
                wait: they end first, with the weights that they began with.
                keep: they go on with their KV.
                abort: they end.
                retract: they go on, and compute their KV again.
            label: the caller's name for the new version.
            id: 32 hexadecimal digits that name the update for other engines; "" for random ones.

        Returns:
            the number of the new version.

        Raises:
            ModelError: a name, shape or dtype is wrong. Nothing has changed.
            WeightsError: writing has failed. Requests fail until another update succeeds.
        """
        run = method_of_feature("update_weights")
        version: int = run(self._core, source, mode=mode, label=label, id=id)
        return version

    def sleep(
        self, level: int = 1, *, tags: Sequence[Literal["weights", "kv"]] = ("weights", "kv")
    ) -> None:
        """Gives memory up until `wake_up`. Addresses and captured programs stay.

        Args:
            level: 1 copies weights to host memory. 2 drops them, and `wake_up` reads them again.
            tags: what to give up.

        Raises:
            RequestError: the engine was made without enable_sleep_mode.
        """
        method_of_feature("sleep")(self._core, level, tuple(tags))

    def wake_up(self, tags: Sequence[Literal["weights", "kv"]] = ()) -> None:
        """Takes memory again. tags: what to take, by default all that was given up."""
        method_of_feature("wake_up")(self._core, tuple(tags))

    @functools.cached_property
    def _prompt_reader(self) -> PromptReader | None:
        return open_prompt_reader(self.config)

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

    @contextlib.contextmanager
    def _requests(self, names: Sequence[str]) -> Iterator[Callable[[], None]]:
        """Aborts these requests at the end of a block of code, if they are unfinished.

        An interrupt ends the block early, or an error of one of the requests. Yields a function
        that lets a pending interrupt through.
        """
        with interrupts_held() as let_interrupt:
            try:
                yield let_interrupt
            finally:
                if not self._core.failed:
                    for name in names:
                        self._core.abort(name)
                    while self._core.has_work():
                        self._core.step()

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        text, given = read_prompt(prompt, with_parts=True)
        ids, inputs = prompt_ids(given, params, self.config, self._tokenizer), None
        if parts := prompt_parts(prompt):
            ids, inputs = place_parts(self._prompt_reader, ids, parts, self.config)
        self._count += 1
        listed = ids.tolist()
        outputs = [CompletionOutput(index) for index in range(params.n)]
        about = None
        if params.prompt_logprobs is not None:
            about = PromptLogprobCollector(self._tokenizer)
        return _Job(
            text=text,
            ids=ids,
            params=params,
            output=RequestOutput(str(self._count), text, listed, outputs),
            requests=[],
            readers=completion_readers(listed, params, self._tokenizer),
            inputs=inputs,
            about_prompt=about,
            open=params.n,
        )

    def _start(
        self, jobs: list[_Job], priorities: list[int], options: list[RequestOptions]
    ) -> None:
        for job, priority, others in zip(jobs, priorities, options, strict=True):
            others["priority"] = priority
            fields = {} if job.inputs is None else job.inputs.fields(job.ids)
            further, given = split_options(fields)
            others.update(further)
            job.requests = self._core.add(
                job.output.request_id,
                job.ids,
                job.params,
                max_total=max_total(len(job.ids), job.params, self.config),
                **others,
            )
            for field, value in given:
                self._core.give(job.output.request_id, field, value)

    def _run(
        self, jobs: list[_Job], advance: Callable[[], None], let_interrupt: Callable[[], None]
    ) -> None:
        left, idle = len(jobs), False
        owners = {request.request_id: job for job in jobs for request in job.requests}
        followed = any(job.followed for job in jobs)
        while left:
            let_interrupt()
            progress = self._core.step()
            for request, error in self._core.take_failures():
                if error is not None and error.ends_call and not len(request.output):
                    raise error
                job = owners[request.request_id]
                if self._close(job, request, "abort" if error is None else "error"):
                    left -= 1
                    advance()
            if progress is None:
                # A step may end with news that the next one acts on.
                if left and idle and not self._core.waits:
                    raise RequestError("the engine has requests that it cannot run")
                idle = not self._core.waits
                continue
            idle = False
            for item in _worth_a_look(progress, followed):
                job = owners[item.request.request_id]
                if self._look(job, item) and not job.open:
                    left -= 1
                    job.output.finished = True
                    advance()

    def _look(self, job: _Job, item: RequestProgress) -> bool:
        """Reads a step's tokens of one completion. Returns whether they ended it."""
        request = item.request
        reader = job.readers[request.sample_index]
        if reader.finished or not (job.followed or item.finished):
            return False
        if item.prompt_logprobs is not None and job.about_prompt is not None:
            job.about_prompt.feed(item.prompt_logprobs)
        if item.experts is not None:
            reader.feed_experts(item.experts)
        tokens = item.new_tokens if job.followed else request.output
        reason = str(request.finish_reason) if item.finished else None
        logprobs = () if item.logprobs is None else (item.logprobs,)
        if not len(tokens) and reason is None:
            return False
        versions = [(item.version, len(tokens))]
        if not job.followed:
            versions = request.runs_until(item.version)
        drawn = () if item.drawn is None else (item.drawn,)
        update = reader.feed(tokens.tolist(), logprobs, reason, item.stop_token, versions, drawn)
        _add(job.output.outputs[request.sample_index], update)
        job.output.num_cached_tokens = job.requests[0].num_cached_tokens
        job.output.metrics = job.requests[0].times
        if not reader.finished:
            return False
        if reader.ended_by_text and not item.finished:
            self._core.abort(job.output.request_id, request.sample_index)
        job.open -= 1
        if job.about_prompt is not None:
            job.output.prompt_logprobs = job.about_prompt.entries
        return True

    def _close(self, job: _Job, request: Request, reason: str) -> bool:
        """Ends a completion that failed or was aborted, with its tokens so far. Returns whether
        the job ended."""
        reader = job.readers[request.sample_index]
        if reader.finished:
            return False
        tokens = () if job.followed else request.output.tolist()
        versions = () if job.followed else request.runs_until(self._core.scheduler.version)
        update = reader.feed(tokens, (), reason, versions=versions)
        _add(job.output.outputs[request.sample_index], update)
        job.open -= 1
        job.output.finished = not job.open
        return job.output.finished


def _worth_a_look(progress: StepProgress, followed: bool) -> Iterator[RequestProgress]:
    """Yields the requests to look at.

    If no job must be followed, only those that ended are: then a step costs nothing per request.
    """
    if followed:
        yield from progress
    else:
        for place in progress.finished:
            yield progress[place]


def _add(output: CompletionOutput, update: CompletionUpdate) -> None:
    output.text += update.text
    output.token_ids += update.token_ids
    if update.logprobs is not None:
        if output.logprobs is None:
            output.logprobs = []
        output.logprobs += update.logprobs
    runs = [*output.weight_versions, *update.versions]
    output.weight_versions = cut_runs(runs, len(output.token_ids))
    output.finish_reason = update.finish_reason
    output.stop_reason = update.stop_reason
    output.sampling_info = update.sampling_info
    output.routed_experts = update.routed_experts


def _progress_bar(total: int, shown: bool) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Returns a context that gives a function to call for each request that is done."""
    if not (shown and sys.stderr.isatty()):
        return contextlib.nullcontext(lambda: None)
    return request_bar(total)
