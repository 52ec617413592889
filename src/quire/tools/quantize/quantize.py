"""Makes a quantized checkpoint, one block of the model after the other."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError, QuireError
from quire.layers.parameter_slice import named_slices
from quire.models import Decoder
from quire.models.files import weight_files
from quire.models.memory_errors import must_fit_memory
from quire.models.quantization import read_quantization
from quire.quantization.fields import TensorInfo
from quire.text.tokenizer import Tokenizer
from quire.tools.quantize.calibration import Calibration, calibration, watch_inputs
from quire.tools.quantize.layer import Sequences, round_block
from quire.tools.quantize.original import OriginalModel
from quire.tools.quantize.recipe import Recipe
from quire.tools.quantize.report import Report
from quire.tools.quantize.work_folder import BlocksDone, WorkFolder, fingerprint

GATE = 5.0
"""The largest increase of perplexity, in percent, with which a model is written."""
_SLICE = 256
"""Number of logit rows that are computed at once."""
_INDEX = "model.safetensors.index.json"
_NOT_COPIED = re.compile(r"\.(safetensors|bin|pt|pth|gguf)$|^config\.json$|\.index\.json$|^README")

OnBlock = Callable[[int, int], None]
"""Called with the number of blocks that are done and the number of all blocks."""


class GateError(QuireError):
    """A quantized model lost too much quality to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of a run in addition to its recipe.

    Attributes:
        data: a text file; None uses the built-in text.
        samples: number of sequences for calibration; None uses the method's default.
        length: tokens of a sequence.
        ignore: modules that are not rounded: a name, or a pattern after `re:`.
        gate: see `Report`.
        force: write the model even if it does not pass the gate.
        device: "cpu", "cuda" or "cuda:N".
        on_block: called after each block.
    """

    data: Path | None = None
    samples: int | None = None
    length: int = 512
    ignore: tuple[str, ...] = ()
    gate: float = GATE
    force: bool = False
    device: str = "cpu"
    on_block: OnBlock = field(default=lambda done, total: None)


def quantize(model: Path, name: str, out: Path, recipe: Recipe, options: Options) -> Report:
    """Quantizes the model in a folder, and writes it, with a report, to the folder `out`.

    Memory holds one block's weights, in the model's dtype, and the hidden states of all sequences
    before that block. After each block the results are on disk, and a later run can continue.

    Raises:
        ModelError: there is no such model, or it is not dense.
        ConfigError: a setting is invalid or does not fit the model.
        GateError: the model does not pass the gate. Nothing is written to `out`, but the results
            are kept. With `force`, the next run writes the model without computing it again.
    """
    device = torch.device(options.device)
    source = OriginalModel(model, device, torch.float32 if device.type == "cpu" else None)
    try:
        work = _Run(source, name, out, recipe, options)
        try:
            with must_fit_memory():
                return work.run()
        finally:
            work.job.close()
    finally:
        source.close()


class _Run:
    def __init__(
        self, source: OriginalModel, name: str, out: Path, recipe: Recipe, options: Options
    ) -> None:
        self.source, self.name, self.options = source, name, options
        self.samples = recipe.samples if options.samples is None else options.samples
        if self.samples < 1 or not 2 <= options.length <= source.spec.max_positions:
            raise ConfigError(
                f"samples must be 1 or more, and length from 2 to {source.spec.max_positions}",
                "samples",
            )
        if math.isnan(options.gate):
            raise ConfigError("gate must be a number", "gate")
        self.count = len(source.spec.layers)
        self.ignored: set[str] = set()
        self.recipe = recipe.fit(self._inputs())
        self.text = calibration(
            Tokenizer.from_path(source.folder), options.data, self.samples, options.length,
            source.spec.vocab_size,
        )  # fmt: skip
        self.job = WorkFolder(out, self._about())

    def _inputs(self) -> dict[str, int]:
        """Returns the number of inputs of each module to quantize.

        Sets `ignored` to the modules that are not quantized.
        """
        patterns = self.options.ignore
        used: set[str] = set()
        inputs: dict[str, int] = {}
        source = self.source
        for index in range(self.count):
            block = source.shapes(index)
            own = {module: layer.inputs for module, _, layer, _ in source.projections(block, index)}
            for pattern in patterns:
                found = {name for name in own if _matches(name, pattern)}
                self.ignored |= found
                used |= {pattern} if found else set()
            inputs |= {name: size for name, size in own.items() if name not in self.ignored}
        for pattern in patterns:
            if pattern not in used:
                raise ConfigError(f"no linear layer is named {pattern!r}", "ignore")
        return inputs

    def _about(self) -> dict[str, Any]:
        files = weight_files(self.source.folder)
        options = self.options
        return {
            "recipe": self.recipe.as_dict(),
            "config": self.source.config,
            "weights": [(file.name, file.stat().st_size, file.stat().st_mtime) for file in files],
            "data": None if options.data is None else fingerprint(options.data),
            "sequences": [self.samples, options.length],
            "ignore": sorted(self.ignored),
            "device": self.source.device.type,
        }

    def run(self) -> Report:
        done = self.job.load() or self._begin(self.text)
        self.options.on_block(done.blocks, self.count)
        while done.blocks < self.count:
            self._block(done)
            done.blocks += 1
            self.job.save(done)
            self.options.on_block(done.blocks, self.count)
        report = self._report(done)
        if not report.passes and not self.options.force:
            raise GateError(
                f"perplexity would rise from {report.perplexity_before:.4f} to "
                f"{report.perplexity_after:.4f}, by {report.change:.2f} %, more than the gate's "
                f"{report.gate:g} %, so {self.job.out} is not written. {self.job.folder} keeps the "
                "results: the same command with --force, or with a larger --gate, writes the model "
                "without computing it again"
            )
        try:
            self._finish(report)
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.job.out}: {error}; the same command continues from here", "out"
            ) from error
        return report

    def _begin(self, text: Calibration) -> BlocksDone:
        outer = self.source.outer()
        states = {
            "calibration": _embedded(outer, text.sequences),
            "original": _embedded(outer, text.held_out),
            "quantized": _embedded(outer, text.held_out),
        }
        return BlocksDone(0, states)

    def _block(self, done: BlocksDone) -> None:
        """Rounds the next block, and computes the hidden states after it."""
        source, index = self.source, done.blocks
        block = source.block(index)
        source.fill(block, f"layers.{index}")
        sequences = Sequences(block, self.options.length, source.device, source.dtype)
        sequences.run(block, done.states["original"])
        calls = -(-len(done.states["calibration"]) // sequences.rows)
        states = done.states["calibration"]
        with watch_inputs(block, 1 / calls) as statistics:
            # A sequential recipe needs the states again, for the rounded block.
            sequences.run(block, states.clone() if self.recipe.sequential else states)
        rounded = round_block(
            source, block, index, self.recipe, statistics, frozenset(self.ignored)
        )
        del block, statistics
        self.job.write(_file(index + 1, self.count), self._stored(rounded.tensors))
        # The next blocks are calibrated with this block in the form that the checkpoint stores.
        infos = {key: TensorInfo(t.dtype, tuple(t.shape)) for key, t in rounded.tensors.items()}
        quantization = read_quantization(
            self.recipe.settings(sorted(self.ignored)), source.spec, infos
        )
        block = source.block(index, quantization)
        source.fill(block, f"layers.{index}", rounded.tensors)
        if self.recipe.sequential:
            sequences.run(block, states)
        sequences.run(block, done.states["quantized"])
        done.errors.update(rounded.errors)
        done.plain += rounded.plain

    def _stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors by the names that the original checkpoint would use."""
        return {self.source.stored_name(name): tensor for name, tensor in tensors.items()}

    @torch.inference_mode()
    def _report(self, done: BlocksDone) -> Report:
        outer = self.source.outer()
        targets = self.text.held_out[:, 1:].to(outer.device).long()
        sums = torch.zeros(3, dtype=torch.float64)
        for before, after, wanted in zip(
            done.states["original"], done.states["quantized"], targets, strict=True
        ):
            for start in range(0, len(wanted), _SLICE):
                end = min(start + _SLICE, len(wanted))
                first, second = (
                    outer.logits(outer.norm(part[start:end].to(outer.device)))
                    .float()
                    .log_softmax(-1)
                    for part in (before, after)
                )
                own = wanted[start:end, None]
                sums[0] -= first.gather(1, own).double().sum().cpu()
                sums[1] -= second.gather(1, own).double().sum().cpu()
                sums[2] += (first.exp() * (first - second)).double().sum().cpu()
        before, after, kl = (sums / targets.numel()).tolist()
        files = [self.job.folder / _file(index + 1, self.count) for index in range(self.count)]
        outside = sum(self.source.tensor(name).nbytes for name in self._outside())
        return Report(
            model=self.name,
            recipe=self.recipe,
            errors=done.errors,
            plain=[*done.plain, *self._heads()],
            tokens=targets.numel(),
            perplexity_before=_exp(before),
            perplexity_after=_exp(after),
            kl=kl,
            bytes_before=sum(file.stat().st_size for file in weight_files(self.source.folder)),
            bytes_after=outside + sum(file.stat().st_size for file in files),
            gate=self.options.gate,
        )

    def _heads(self) -> list[str]:
        return [self.source.family.head.removesuffix(".weight")]

    def _outside(self) -> list[str]:
        """Returns the names of tensors outside of all blocks."""
        inside = {
            self.source.place(f"layers.{index}.{name}").name
            for index in range(self.count)
            for name, _ in named_slices(self.source.shapes(index))
        }
        ignored = self.source.family.ignored
        return [
            name
            for name in self.source.stored
            if name not in inside and not (ignored is not None and ignored.search(name))
        ]

    def _finish(self, report: Report) -> None:
        """Writes the files other than the blocks', and renames the folder to `out`."""
        job, source = self.job, self.source
        outside = {source.stored[name]: source.tensor(name) for name in self._outside()}
        job.write(_file(0, self.count), outside)
        index: dict[str, str] = {}
        total = 0
        for number in range(self.count + 1):
            name = _file(number, self.count)
            for key, size in job.sizes(name).items():
                index[key] = name
                total += size
        about = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (job.folder / _INDEX).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
        left = [*sorted(self.ignored), *self._heads()]
        ignore = list(dict.fromkeys([*left, *map(source.stored_module, left)]))
        settings = self.recipe.settings(ignore)
        old = source.config.get("quantization_config")
        if isinstance(old, dict):
            # The old settings had only scales for 8-bit KV, which do not change.
            settings["kv_cache_scheme"] = old.get("kv_cache_scheme")
        config = {**source.config, "quantization_config": settings}
        (job.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        for file in sorted(source.folder.iterdir()):
            if file.is_file() and not _NOT_COPIED.search(file.name):
                job.copy(file)
        report.write(job.folder)
        job.finish()


def _matches(module: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return module == pattern
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression: {error}", "ignore") from error


def _file(number: int, blocks: int) -> str:
    """Returns the name of a file of the model. The first file has the tensors outside of blocks."""
    return f"model-{number + 1:05d}-of-{blocks + 1:05d}.safetensors"


@torch.inference_mode()
def _embedded(outer: Decoder, tokens: Tensor) -> Tensor:
    """Returns the hidden states before the first block, [n, length, width] on the host."""
    # Published code rounds the scale.
    scale = torch.tensor(outer.spec.embedding_scale, dtype=outer.dtype).item()
    lines = [outer.embedding(line.to(outer.device)).mul_(scale).cpu() for line in tokens]
    return torch.stack(lines)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
