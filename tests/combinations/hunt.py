"""Random engines with random requests, one after another.

`python -m tests.combinations.hunt 0 --seconds 600` begins with seed 0 and prints failures.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
import traceback
from collections import Counter, OrderedDict
from pathlib import Path
from random import Random

import pytest
import torch

from quire import SamplingParams
from quire.errors import ConfigError, ModelError
from quire.features.kv_offload.costs import CostModel
from tests.combinations.compare import difference
from tests.combinations.draw import Asked, Requests, Setting, draw_neutral, draw_setting
from tests.combinations.models import Checkpoints
from tests.combinations.play import Answer, Engine

_ENGINES = 6
_ANSWERS = 200


class Plain:
    """Engines without features, one per combination of settings that change tokens. They answer one
    request at a time. The latest engines and answers are kept."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._engines: OrderedDict[str, Engine] = OrderedDict()
        self._answers: dict[tuple[int, str], Answer] = {}

    def engine(self, setting: Setting, *, adapters: bool = False) -> Engine:
        """Returns the engine for a setting, with room for all adapters where these are used."""
        key = repr((setting.family, setting.dtype, sorted(setting.numbers.items()), adapters))
        if key not in self._engines:
            self._engines[key] = Engine.plain(self.checkpoints, setting, adapters=adapters)
            if len(self._engines) > _ENGINES:
                self._engines.popitem(last=False)[1].shutdown()
                self._answers.clear()
        self._engines.move_to_end(key)
        return self._engines[key]

    def answer(self, setting: Setting, asked: Asked) -> Answer:
        nothing = {"arrives": 0, "leaves": None, "salt": "", "tenant": "", "priority": 0}
        alone = dataclasses.replace(asked, **nothing)  # type: ignore[arg-type]
        engine = self.engine(setting, adapters=bool(asked.adapter))
        key = id(engine), repr(alone)
        if key not in self._answers:
            if len(self._answers) > _ANSWERS:
                self._answers.clear()
            (self._answers[key],) = engine.play([alone])
        return self._answers[key]

    def shutdown(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()


class DifferenceError(AssertionError):
    """A request's results differ from those it gets alone."""


def run(
    seed: int,
    plain: Plain,
    tally: Counter[str],
    *,
    rounds: int = 2,
    show: bool = False,
    ranks: int = 1,
) -> None:
    """Draws an engine and rounds of requests, and compares the results. tally: counts what
    happened.

    Raises:
        DifferenceError, or whatever goes wrong.
    """
    draw = Random(seed)
    setting = draw_setting(draw, ranks)
    if show:
        _tell(setting)
    with tempfile.TemporaryDirectory() as folder:
        try:
            plain.engine(setting)
            engine = Engine.drawn(plain.checkpoints, setting, Path(folder))
        except (ConfigError, ModelError) as error:
            tally[f"refused: {str(error)[:150]}"] += 1
            return
        tally["configurations"] += 1
        try:
            requests = Requests(draw, setting, lambda asked: _said(plain.answer(setting, asked)))
            for _ in range(rounds):
                _round(draw, engine, plain, requests, tally, show)
            _last(engine, plain)
            _count(engine, tally)
        finally:
            engine.shutdown()


def _said(answer: Answer) -> tuple[list[int], str]:
    if not answer.choices:
        return [], ""
    return answer.choices[0].tokens, answer.choices[0].text


def _round(
    draw: Random,
    engine: Engine,
    plain: Plain,
    requests: Requests,
    tally: Counter[str],
    show: bool,
) -> None:
    """Runs requests, compares their results, and checks that nothing of them stays behind."""
    asked = [requests.one() for _ in range(draw.choice([3, 6, 9]))]
    expected = [plain.answer(engine.setting, each) for each in asked]
    if show:
        _tell(*asked)
    forgets = {draw.randint(1, 60)} if draw.random() < 0.15 else set()
    found = engine.play(asked, checks=draw.random() < 0.2, forgets=forgets)
    tally["requests"] += len(asked)
    tally["completions"] += sum(each.params.n for each in asked)
    for each, alone, got in zip(asked, expected, found, strict=True):
        if got.refused and not alone.refused:
            tally[f"request refused: {got.refused[:120]}"] += 1
            continue
        what = difference(each, alone, got)
        if what:
            raise DifferenceError(f"{what}\n{each}")
    engine.check_idle()
    if draw.random() < 0.4:
        engine.check_empty()
    _neutral(draw, engine.setting, plain, draw.choice(asked))


def _neutral(draw: Random, setting: Setting, plain: Plain, asked: Asked) -> None:
    """Checks that parameters without an effect change nothing."""
    if asked.pooling is not None:
        return
    more = dataclasses.replace(asked, params=draw_neutral(draw, asked.params))
    before, with_more = plain.answer(setting, asked), plain.answer(setting, more)
    what = difference(dataclasses.replace(asked, leaves=None), before, with_more)
    if what:
        raise DifferenceError(f"what should be neutral: {what}\n{more}")


def _last(engine: Engine, plain: Plain) -> None:
    """Checks that a plain request still works and that nothing of it stays behind."""
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    last = Asked([5, 6, 7, 8], greedy)
    what = difference(last, plain.answer(engine.setting, last), engine.play([last])[0])
    if what:
        raise DifferenceError(f"last request: {what}")
    engine.check_idle()
    engine.check_empty()


def _count(engine: Engine, tally: Counter[str]) -> None:
    stats = engine.core.stats()
    tally["preemptions"] += stats.preemptions
    tally["prefix hit tokens"] += stats.prefix_hit_tokens
    tally["steps"] += stats.steps
    if stats.speculation is not None:
        for name, source in stats.speculation.sources.items():
            tally[f"drafts of {name}"] += source.drafted
            tally[f"accepted of {name}"] += source.accepted
    if stats.tiers is not None:
        tally["tokens from the host"] += stats.tiers.host_hit_tokens
        tally["tokens from files"] += stats.tiers.disk_hit_tokens


def patch_costs(patch: pytest.MonkeyPatch) -> None:
    """Makes lower tiers always worthwhile, because rates measured with a tiny model mean
    nothing."""
    for name in ("fetch_pays", "swap_pays", "state_worth_keeping"):
        patch.setattr(CostModel, name, lambda self, *_: True)
    patch.setattr(CostModel, "worth_keeping", True)


def _tell(*lines: object) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--folder", help="where checkpoints are kept")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(options.folder or tempfile.mkdtemp())
    plain, tally, bad = Plain(Checkpoints(folder)), Counter[str](), list[int]()
    end, seed = time.monotonic() + options.seconds, options.first
    with pytest.MonkeyPatch.context() as patch:
        patch_costs(patch)
        while time.monotonic() < end and seed < options.first + options.count:
            try:
                run(seed, plain, tally, show=options.show, ranks=options.ranks)
            except Exception as error:
                bad.append(seed)
                told = "" if isinstance(error, DifferenceError) else traceback.format_exc(-8)
                _tell(f"--- seed {seed}: {error}", told)
            seed += 1
    plain.shutdown()
    _tell(f"seeds {options.first} to {seed - 1}; bad: {bad}")
    for name, count in sorted(tally.items()):
        _tell(f"{count:8} {name}")


if __name__ == "__main__":
    main()
