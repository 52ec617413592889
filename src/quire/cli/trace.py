"""`quire trace`: a small workload, and a trace of its steps."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import typer

from quire.cli.progress import counted
from quire.config import EngineArgs
from quire.errors import ConfigError, PromptTooLongError
from quire.llm import LLM
from quire.sampling_params import SamplingParams


def trace(
    output: Path, engine: EngineArgs, requests: int, prompt_tokens: int, output_tokens: int
) -> None:
    """Runs requests that come all at once, after one that compiles everything.

    Raises:
        ConfigError: `output` cannot be written, or `trace_dir` is set.
        RequestError: the model's context does not hold such requests.
    """
    if engine.trace_dir is not None:
        raise ConfigError("quire trace writes one file: leave trace_dir out", "trace_dir")
    if not os.access(output.parent, os.W_OK) or output.is_dir():
        raise ConfigError(f"{str(output)!r} cannot be written")
    with tempfile.TemporaryDirectory() as folder:
        settings = dataclasses.asdict(dataclasses.replace(engine, trace_dir=folder))
        llm = LLM(settings.pop("model"), **settings)
        with closing(_Closing(llm)):
            if prompt_tokens >= llm.config.scheduler.max_model_len:  # before so many are drawn
                raise PromptTooLongError(prompt_tokens, llm.config.scheduler.max_model_len)
            params = SamplingParams(
                temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
            )
            rng = np.random.default_rng(engine.seed)
            size = (requests + 1, prompt_tokens)
            prompts = rng.integers(0, llm.config.vocab_size, size).tolist()
            llm.generate([prompts[0]], params, use_tqdm=False)
            llm.generate(prompts[1:], params)
            steps = llm.stats().steps
        _join(sorted(Path(folder).iterdir()), output)
    typer.echo(f"{output}: {counted(steps, 'step')}; open it in https://ui.perfetto.dev")


class _Closing:
    def __init__(self, llm: LLM) -> None:
        self.close = llm.shutdown


def _join(files: list[Path], output: Path) -> None:
    """Joins trace files, each an array with one event per line; the last line holds no event."""
    with output.open("w", encoding="utf-8") as out:
        out.write("[\n")
        for file in files:
            with file.open(encoding="utf-8") as lines:
                out.writelines(line for line in lines if line.endswith("},\n"))
        out.write('{"name":"end of file","ph":"M","pid":0,"args":{}}\n]\n')
