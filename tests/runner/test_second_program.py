"""A second model over the same lanes: its own program, KV groups and positions."""

from __future__ import annotations

from pathlib import Path

import torch

import quire
from quire import LLM, SamplingParams, ops
from quire.arrays import int32
from quire.models import Decoder, build_model, load_config, load_weights, spec_from_config
from quire.ops.rows import PROMPT
from quire.plan import KVGroup
from quire.runner.hooks import HeadContext, Level, ProgramHook
from quire.runner.kv_cache import KVCache
from quire.runner.program import BodyShape, BoundModel, HeadShape, StepProgram
from quire.runner.state import BatchState, ColumnSpec, Limits

EMBEDDED = Path(quire.__file__).parent / "embedded"
PROMPTS = [[40, 50, 60, 70, 80, 90, 100, 110, 120], [300, 301, 302, 303, 304]]
STEPS = 6
BLOCK = 16
CPU = torch.device("cpu")


class Likeliest(ProgramHook):
    """Advances lanes by the computed tokens, and keeps the likeliest token of each lane.

    text: int32 [lanes, max_len], gets it behind what is there, or None.
    """

    def __init__(self, text: torch.Tensor | None, position: torch.Tensor) -> None:
        self._text, self._position = text, position
        self.found: list[list[int]] = []

    def tokens(self, ctx: HeadContext) -> None:
        likeliest = ctx.raw.argmax(dim=-1).int()
        lanes, lengths = ctx.logit_rows.lanes.long(), ctx.logit_rows.lengths
        self._position[lanes] = lengths
        self.found.append(likeliest.tolist())
        if self._text is not None:
            self._text[lanes, lengths.long()] = likeliest


def load(name: str) -> Decoder:
    path = EMBEDDED / name
    model = build_model(spec_from_config(load_config(path)), device=CPU, dtype=torch.float32)
    load_weights(model, path)
    return model


def likeliest(name: str, texts: list[list[int]]) -> list[int]:
    """Returns the next token of an engine with this model for each text."""
    llm = LLM(str(EMBEDDED / name), num_kv_blocks=200, max_model_len=128)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    outputs = llm.generate(texts, params, use_tqdm=False)
    llm.shutdown()
    return [output.outputs[0].token_ids[0] for output in outputs]


@torch.inference_mode()
def test_two_models_follow_one_text() -> None:
    models = [load("quire-tiny"), load("quire-tiny-draft")]
    assert models[0].spec.hidden_size != models[1].spec.hidden_size
    assert models[0].kv_layouts != models[1].kv_layouts
    groups: list[KVGroup] = []
    ranges, caches = [], []
    for model in models:
        own = model.kv_groups(BLOCK)
        ranges.append(range(len(groups), len(groups) + len(own)))
        groups += own
        kv_format = ops.KVFormat(torch.float32)
        blocks = [8] * len(own)
        caches.append(
            KVCache(own, blocks, layouts=model.kv_layouts, kv_format=kv_format, device=CPU)
        )
    limits = Limits(lanes=2, tokens=32, logit_rows=2, length=64)
    state = BatchState(limits, groups, CPU, [ColumnSpec("second_position")])
    second = state.columns["second_position"]
    hooks = [Likeliest(state.tokens, state.position), Likeliest(None, second)]
    programs = [
        StepProgram(BoundModel(model, state, cache.layers, groups, position), [hook])
        for model, cache, groups, position, hook in zip(
            models, caches, ranges, (state.position, second), hooks, strict=True
        )
    ]
    for table in state.tables:
        table[0, :4] = torch.arange(4)
        table[1, :4] = torch.arange(4, 8)
    for lane, prompt in enumerate(PROMPTS):
        state.tokens[lane, : len(prompt)] = torch.from_numpy(int32(prompt))
    for step in range(STEPS):
        lengths = [len(prompt) for prompt in PROMPTS] if step == 0 else [1, 1]
        packed = state.idle_inputs()
        lanes, query_start, logit_start, flags, _, _, _ = state.split_inputs(packed)
        lanes[:], flags[:] = (0, 1), PROMPT if step == 0 else 0
        query_start[:] = 0, lengths[0], sum(lengths)
        logit_start[:] = 0, 1, 2
        state.inputs.copy_(torch.from_numpy(packed))
        # The second program runs first, so that both read the same tokens.
        for program in reversed(programs):
            program.body(BodyShape(sum(lengths), 2, max(lengths)))
            program.head(HeadShape(2, Level.PLAIN))
    texts = [state.tokens[lane, : len(PROMPTS[lane]) + STEPS].tolist() for lane in (0, 1)]
    for name, hook in zip(("quire-tiny", "quire-tiny-draft"), hooks, strict=True):
        starts = [text[: len(text) - STEPS + i] for i in range(STEPS) for text in texts]
        assert [token for step in hook.found for token in step] == likeliest(name, starts)
