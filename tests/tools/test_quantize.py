"""`quire quantize`: written checkpoints, their readers, refused options, and runs after a kill."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.cli.quantize import quantize as command
from quire.errors import ConfigError, ModelError
from quire.models.quantization import read_quantization
from quire.ops import Weight
from quire.ops.reference.quantized import dequantize
from quire.quantization import ProjectionShare
from quire.quantization.fields import TensorInfo
from quire.tools.quantize import GateError, Options, Recipe, Report, quantize
from quire.tools.quantize.calibration import watch_inputs
from quire.tools.quantize.gptq import gptq
from quire.tools.quantize.layer import Sequences
from quire.tools.quantize.original import OriginalModel
from quire.tools.quantize.recipe import Grid
from quire.tools.quantize.rounding import find_scales, output_power, round_to, stored_tensors
from quire.tools.quantize.scaling import move_scales
from quire.tools.quantize.work_folder import WorkFolder
from tests.models.checkpoints import make
from tests.models.harness import Harness
from tests.models.small_tokenizer import save_tokenizer
from tests.models.test_quantized_checkpoints import loaded, logits, projections

RECIPES: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq", "group_size": 16},
    "gptq-asymmetric": {"method": "gptq", "group_size": 16, "symmetric": False},
    "gptq-8-channel": {"method": "gptq", "bits": 8, "group_size": -1},
    "awq": {"method": "awq", "group_size": 16},
    "rtn": {"method": "rtn", "group_size": 16},
    "int8": {"method": "int8"},
    "int8-weights": {"method": "int8", "weight_only": True},
    "smoothquant": {"method": "smoothquant"},
    "fp8": {"method": "fp8"},
    "fp8-weights": {"method": "fp8", "weight_only": True},
    "fp8-blocks": {"method": "fp8", "group_size": 16},
}
TEXT = Path(__file__).parents[2] / "LICENSE"
"""A short text to calibrate with; `test_the_command` reads the built-in one, which is long."""
OPTIONS = Options(data=TEXT, samples=6, length=32, gate=1e6)
IN_BITS = {"gptq": 4, "gptq-asymmetric": 4, "awq": 4, "rtn": 4}


def original(folder: Path, case: str = "qwen3") -> Path:
    folder.mkdir()
    make(folder, case)
    save_tokenizer(folder)
    return folder


Made = Callable[[str, str], tuple[Path, Path, Report]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Makes a case's checkpoint and a quantized one, each only once. Returns both and the
    report."""
    originals: dict[str, Path] = {}
    reports: dict[tuple[str, str], tuple[Path, Path, Report]] = {}

    def make_once(case: str, name: str) -> tuple[Path, Path, Report]:
        if case not in originals:
            originals[case] = original(tmp_path_factory.mktemp(case) / "model", case)
        if (case, name) not in reports:
            source, out = originals[case], originals[case].with_name(name)
            report = quantize(source, "tiny", out, Recipe.with_defaults(**RECIPES[name]), OPTIONS)
            reports[case, name] = source, out, report
        return reports[case, name]

    return make_once


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("case", ["qwen3", "llama-biases"])
def test_a_checkpoint_stands_for_its_model(name: str, case: str, made: Made) -> None:
    source, out, report = made(case, name)
    assert not out.with_name(f"{name}.partial").exists()
    # Reloaded, the model computes nearly the same.
    plain, found = logits(loaded(source)), logits(loaded(out))
    error = (found - plain).norm() / plain.norm()
    assert error < (0.8 if name in IN_BITS else 0.2)
    told = json.loads((out / "quantization_report.json").read_text())
    assert told["perplexity"]["after"] == report.perplexity_after
    assert told["unquantized"] == ["lm_head"]
    modules = {key.removesuffix(".weight") for key, _, _ in projections(loaded(source))}
    assert told["layer_errors"].keys() == modules
    assert all(0 < e < 0.5 for e in told["layer_errors"].values())
    assert report.bytes_after < report.bytes_before
    assert "| KL to the original" in (out / "quantization_report.md").read_text()


@pytest.mark.parametrize("case", ["gemma2", "cohere2", "exaone4", "granite"])
def test_models_of_other_shapes(case: str, tmp_path: Path) -> None:
    """Norms with an offset, after attention and MLP, or shared by both; scaled embeddings and
    logits."""
    source = original(tmp_path / "model", case)
    recipe = Recipe.with_defaults("awq", bits=8, group_size=16)
    report = quantize(source, "tiny", tmp_path / "out", recipe, OPTIONS)
    assert abs(report.change) < 1
    plain, found = logits(loaded(source)), logits(loaded(tmp_path / "out"))
    assert (found - plain).norm() / plain.norm() < 0.03


@pytest.mark.parametrize("name", RECIPES)
def test_transformers_reads_the_same_weights(name: str, made: Made) -> None:
    """Loaded with the library's defaults, every weight equals Quire's."""
    pytest.importorskip("compressed_tensors")
    import transformers

    _, out, _ = made("llama-biases", name)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = [5, 17, 99, 3, 42, 7, 7, 150, 23]
    with torch.inference_mode():
        # The first pass decompresses weights that loading did not decompress.
        expected = oracle(torch.tensor([ids])).logits[0]
    weights = dict(oracle.named_parameters())
    model = loaded(out)
    for key, _, own in projections(model):
        torch.testing.assert_close(weights[key].double(), own, rtol=1e-5, atol=1e-7)
    found = logits(model)
    recipe = Recipe.with_defaults(**RECIPES[name])
    # Once the library has decompressed weights, it does not round inputs.
    bound = 1e-4 if recipe.inputs == "none" else 0.2 if recipe.grid.float else 0.05
    assert (found - expected).norm() / expected.norm() < bound


def test_methods_that_look_at_data_lose_less(made: Made) -> None:
    lost = {name: sum(made("qwen3", name)[2].errors.values()) for name in ("rtn", "gptq", "awq")}
    assert lost["gptq"] < lost["rtn"]
    assert lost["awq"] < lost["rtn"]


def _products(rows: int, width: int) -> Tensor:
    torch.manual_seed(0)
    mixed = torch.randn(rows, width) @ torch.randn(width, width) * torch.rand(width) ** 3
    return mixed.t() @ mixed


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 16])
def test_gptq_changes_outputs_less_than_rounding(bits: int, symmetric: bool, group: int) -> None:
    products, weight = _products(200, 48), torch.randn(24, 48)
    products[5] = products[:, 5] = 0  # an input that is always zero
    grid = Grid(bits, group=group, symmetric=symmetric)
    plain = round_to(weight, find_scales(weight, grid, torch.float32))
    searched = find_scales(weight, grid, torch.float32, products)
    powers = [
        output_power(rounded.dequantized() - weight, products)
        for rounded in (plain, round_to(weight, searched), gptq(weight, searched, products))
    ]
    assert powers[2] < powers[1] <= powers[0] * 1.05
    values = gptq(weight, searched, products).values
    assert int(values.amin()) >= -(2 ** (bits - 1))
    assert int(values.amax()) < 2 ** (bits - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_searched_scales_of_floats_change_outputs_less(dtype: torch.dtype) -> None:
    products, weight = _products(200, 48), torch.randn(24, 48)
    weight[3] = 0
    grid = Grid(8, float=True)
    plain, searched = (find_scales(weight, grid, dtype, found) for found in (None, products))
    ratios = searched.scales / plain.scales
    assert ((ratios > 0.99) & (ratios < 2)).all()
    powers = [
        output_power(round_to(weight, scales).dequantized() - weight, products)
        for scales in (plain, searched)
    ]
    assert powers[1] < 0.9 * powers[0]


def test_blocks_of_floats_have_one_scale() -> None:
    weight = torch.randn(40, 48)
    scales = find_scales(weight, Grid(8, float=True, group=32, outputs=32), torch.float32)
    for rows in (slice(0, 32), slice(32, 40)):
        tops = weight[rows, :32].abs().amax(), weight[rows, 32:].abs().amax()
        assert torch.allclose(
            scales.scales[rows], torch.stack(tops).expand(scales.scales[rows].shape) / 448
        )


def test_gptq_refuses_values_that_are_not_finite() -> None:
    weight = torch.randn(4, 16)
    scales = find_scales(weight, Grid(4), torch.float32)
    with pytest.raises(ModelError, match="not finite"):
        gptq(weight, scales, torch.full((16, 16), torch.nan))


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.parametrize("case", ["llama-biases", "qwen3", "mistral-window"])
def test_moved_scales_change_no_output(method: str, case: str, tmp_path: Path) -> None:
    """Factors are folded into norms and projections so that the block's results stay the same."""
    source = OriginalModel(original(tmp_path / "model", case), torch.device("cpu"), torch.float32)
    block = source.block(0)
    source.fill(block, "layers.0")
    torch.manual_seed(0)
    states = torch.randn(3, 24, 48) * torch.linspace(0.1, 5, 48)
    sequences = Sequences(block, 24, torch.device("cpu"), torch.float32)
    before, after = states.clone(), states.clone()
    weights = block.mlp.up.weight.values.clone()
    with watch_inputs(block, 1.0) as statistics:
        sequences.run(block, before)
    recipe = Recipe.with_defaults(method, group_size=16 if method == "awq" else None)
    move_scales(block, statistics, recipe, torch.float32)
    assert not torch.equal(block.mlp.up.weight.values, weights)
    sequences.run(block, after)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    moved = {name: own.products.clone() for name, own in statistics.items()}
    with watch_inputs(block, 1.0) as statistics:
        sequences.run(block, states.clone())
    for name, own in statistics.items():
        torch.testing.assert_close(own.products, moved[name], rtol=1e-3, atol=1e-2)


def test_blocks_compute_as_the_model_does(tmp_path: Path) -> None:
    source = OriginalModel(original(tmp_path / "model"), torch.device("cpu"), torch.float32)
    tokens = torch.randint(0, 211, (5, 19), generator=torch.manual_seed(0))
    outer = source.outer()
    states = torch.stack([outer.embedding(line) for line in tokens])
    for index in range(3):
        block = source.block(index)
        source.fill(block, f"layers.{index}")
        Sequences(block, 19, torch.device("cpu"), torch.float32).run(block, states)
    found = outer.logits(outer.norm(states[3]))
    harness = Harness(loaded(source.folder))
    (expected,) = harness.step([(harness.add(tokens[3].tolist()), 19)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_gate(tmp_path: Path) -> None:
    source = original(tmp_path / "model")
    recipe = Recipe.with_defaults("rtn", group_size=16)
    strict = Options(data=TEXT, samples=6, length=32, gate=-99.0)
    kept = r"out\.partial keeps the results: the same command with --force, or .* --gate"
    with pytest.raises(GateError, match=kept):
        quantize(source, "tiny", tmp_path / "out", recipe, strict)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="gate must be a number"):
        quantize(source, "tiny", tmp_path / "out", recipe, replace(strict, gate=math.nan))
    # Computed layers are not computed again.
    blocks: list[int] = []
    force = Options(
        data=TEXT, samples=6, length=32, gate=-99.0, force=True,
        on_block=lambda done, _: blocks.append(done),
    )  # fmt: skip
    report = quantize(source, "tiny", tmp_path / "out", recipe, force)
    assert blocks == [3]
    assert not report.passes
    assert loaded(tmp_path / "out") is not None


def test_a_larger_gate_reuses_computed_rows(tmp_path: Path) -> None:
    source = original(tmp_path / "model")
    recipe = Recipe.with_defaults("rtn", group_size=16)
    blocks: list[int] = []
    options = replace(OPTIONS, gate=-99.0, on_block=lambda done, _: blocks.append(done))
    for _ in range(2):
        with pytest.raises(GateError):
            quantize(source, "tiny", tmp_path / "out", recipe, options)
    assert blocks == [0, 1, 2, 3, 3]
    report = quantize(source, "tiny", tmp_path / "out", recipe, replace(options, gate=1e6))
    assert blocks[5:] == [3]
    assert report.passes


KILLED = """
import os, signal, sys
from pathlib import Path
from quire.tools.quantize import Options, Recipe, quantize
from quire.tools.quantize.work_folder import WorkFolder

def on_block(done, total):
    if done == 2:
        os.kill(os.getpid(), signal.SIGKILL)

quantize(
    Path(sys.argv[1]), "tiny", Path(sys.argv[2]), Recipe.with_defaults("gptq", group_size=16),
    Options(data=Path(sys.argv[3]), samples=6, length=32, gate=1e6, on_block=on_block),
)
"""


def test_a_kill_costs_one_block(tmp_path: Path) -> None:
    source = original(tmp_path / "model")
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), str(TEXT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out").exists()
    recipe = Recipe.with_defaults("gptq", group_size=16)
    with pytest.raises(ConfigError, match="begun with another"):
        quantize(
            source, "tiny", tmp_path / "out", Recipe.with_defaults("rtn", group_size=16), OPTIONS
        )
    blocks: list[int] = []
    options = replace(OPTIONS, on_block=lambda count, _: blocks.append(count))
    quantize(source, "tiny", tmp_path / "out", recipe, options)
    assert blocks == [2, 3]
    quantize(source, "tiny", tmp_path / "whole", recipe, OPTIONS)
    assert _digests(tmp_path / "out") == _digests(tmp_path / "whole")


def test_damaged_files_are_not_given_a_name(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "out", {"bits": 4})
    folder.write("model-1.safetensors", {"x": torch.ones(2, 3, dtype=torch.bfloat16)})
    assert folder.sizes("model-1.safetensors") == {"x": 12}
    os.truncate(folder.folder / "model-1.safetensors", 60)
    with pytest.raises(ConfigError, match=r"model-1.safetensors is damaged; remove .*out\.partial"):
        folder.sizes("model-1.safetensors")
    folder.close()


def test_folders_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.partial").write_text("x")
    (tmp_path / "volume").mkdir()
    is_mount = Path.is_mount
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume" or is_mount(path))
    for out, message in (
        (Path(), "exists already"),
        (tmp_path / "file" / "out", "cannot make"),
        (tmp_path / "taken", "cannot make .*Not a directory"),
        (tmp_path / ("x" * 255), "cannot make .*too long"),
        (tmp_path / "volume", "is a mounted volume: name a folder in it"),
    ):
        with pytest.raises(ConfigError, match=message):
            WorkFolder(out, {"bits": 4})
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    folder = WorkFolder(Path(), {"bits": 4})
    folder.finish()
    folder.close()
    assert list(tmp_path.glob("empty*")) == [tmp_path / "empty"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_leads_to_the_folder_that_is_made(there: bool, tmp_path: Path) -> None:
    if there:
        (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    folder = WorkFolder(tmp_path / "out", {"bits": 4})
    folder.write("model.safetensors", {"x": torch.ones(2)})
    folder.finish()
    folder.close()
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "real"]


def test_a_full_disk_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one line, and computed layers are kept for the next run."""
    source = original(tmp_path / "model")

    def full(self: WorkFolder, file: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    recipe = Recipe.with_defaults("rtn", group_size=16)
    with monkeypatch.context() as patched:
        patched.setattr(WorkFolder, "copy", full)
        with pytest.raises(
            ConfigError, match="No space left on device; the same command continues"
        ):
            quantize(source, "tiny", tmp_path / "out", recipe, OPTIONS)
    blocks: list[int] = []
    options = replace(OPTIONS, on_block=lambda count, _: blocks.append(count))
    quantize(source, "tiny", tmp_path / "out", recipe, options)
    assert blocks == [3]


@pytest.mark.parametrize("device", ["cuda:2", "cuda:x", "cuda0", "tpu"])
def test_missing_devices_are_refused(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=f"device '{device}' is not there: found 2 GPUs"):
        command(method="rtn", out=tmp_path / "out", device=device)


def test_two_processes_cannot_write_one_folder(tmp_path: Path) -> None:
    first = WorkFolder(tmp_path / "out", {"bits": 4})
    with pytest.raises(ConfigError, match=r"another process is making .*out\.partial"):
        WorkFolder(tmp_path / "out", {"bits": 4})
    first.close()
    WorkFolder(tmp_path / "out", {"bits": 4}).close()


def _digests(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
    }


def test_layers_left_alone(tmp_path: Path) -> None:
    source = original(tmp_path / "model")
    options = Options(
        data=TEXT, samples=6, length=32, gate=1e6,
        ignore=("model.layers.1.mlp.down_proj", r"re:.*self_attn\.v_proj"),
    )  # fmt: skip
    report = quantize(
        source, "tiny", tmp_path / "out", Recipe.with_defaults("rtn", group_size=16), options
    )
    left = ["model.layers.1.mlp.down_proj"]
    left += [f"model.layers.{index}.self_attn.v_proj" for index in range(3)]
    assert sorted(report.plain) == sorted([*left, "lm_head"])
    exact = {name: own for name, _, own in projections(loaded(source))}
    for name, _, own in projections(loaded(tmp_path / "out")):
        assert torch.equal(own, exact[name]) == (name.removesuffix(".weight") in left)


def test_all_other_tensors_and_files_are_kept(tmp_path: Path) -> None:
    source = original(tmp_path / "model")
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    quantize(source, "tiny", tmp_path / "out", Recipe.with_defaults("rtn", group_size=16), OPTIONS)
    before = load_file(source / "model.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, tensor in before.items():
        if "proj" not in name:
            own = load_file(tmp_path / "out" / index["weight_map"][name])[name]
            assert torch.equal(own, tensor)
            assert own.dtype == tensor.dtype
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_invalid_recipes_are_refused() -> None:
    for choices, message in (
        ({"method": "gguf"}, "expected one of: gptq, awq"),
        ({"method": "gptq", "bits": 3}, "4 or 8"),
        ({"method": "awq", "group_size": 24}, "multiple of 16"),
        ({"method": "rtn", "weight_only": True}, "quantizes weights only"),
        ({"method": "int8", "group_size": 64}, "no groups"),
        ({"method": "int8", "bits": 4}, "8 bits"),
        ({"method": "fp8", "symmetric": False}, "symmetric"),
        ({"method": "fp8", "group_size": 8}, "side of its blocks"),
        ({"method": "smoothquant", "weight_only": True}, "use int8 for weights only"),
    ):
        with pytest.raises(ConfigError, match=message):
            Recipe.with_defaults(**choices)


@pytest.mark.parametrize(
    ("inputs", "group", "message"),
    [
        ([320, 1024], 64, "--group-size 64 or 32 or 16 divides all layers; 128 does not"),
        ([576, 1536], 64, "--group-size 64 or 32 or 16 divides all layers; 128 does not"),
        ([4096, 11008], 128, None),
        ([172, 64], 0, r"--group-size -1 fits any layer \(a scale for each output\); 128 does not"),
    ],
)
def test_a_group_size_that_fits_the_model(
    inputs: list[int], group: int, message: str | None
) -> None:
    sizes = {f"layer{index}": size for index, size in enumerate(inputs)}
    assert Recipe.with_defaults("gptq").fit(sizes).grid.group == group
    given = Recipe.with_defaults("gptq", group_size=128)
    if message is None:
        assert given.fit(sizes) == given
        return
    with pytest.raises(ConfigError, match=rf"^layer0 has {inputs[0]} inputs: {message}$"):
        given.fit(sizes)


def test_the_default_group_size(tmp_path: Path) -> None:
    source = original(tmp_path / "model")
    report = quantize(source, "tiny", tmp_path / "out", Recipe.with_defaults("rtn"), OPTIONS)
    assert report.recipe.grid.group == 16
    assert "groups of 16" in report.markdown()


def test_refusals(tmp_path: Path) -> None:
    source = original(tmp_path / "model")
    recipe = Recipe.with_defaults("rtn", group_size=16)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"48 inputs: --group-size 16 divides .*; 128 does not"):
        quantize(source, "tiny", out, Recipe.with_defaults("rtn", group_size=128), OPTIONS)
    with pytest.raises(ConfigError, match="no linear layer is named 'q_proj'"):
        quantize(source, "tiny", out, recipe, replace(OPTIONS, ignore=("q_proj",)))
    short = tmp_path / "short"
    short.write_text("abc")
    with pytest.raises(ConfigError, match="two sequences of 200"):
        quantize(source, "tiny", out, recipe, Options(data=short, length=200))
    quantize(source, "tiny", out, recipe, OPTIONS)
    with pytest.raises(ConfigError, match="exists already"):
        quantize(source, "tiny", out, recipe, OPTIONS)
    with pytest.raises(ConfigError, match="quantized already"):
        quantize(out, "tiny", tmp_path / "again", recipe, OPTIONS)
    transposed = original(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ModelError, match="fused or transposed"):
        quantize(transposed, "tiny", tmp_path / "again", recipe, OPTIONS)
    assert not list(tmp_path.glob("*.partial"))


def test_the_command(tmp_path: Path) -> None:
    source = original(tmp_path / "model")
    command = [
        sys.executable, "-m", "quire", "quantize", str(source), "--method", "gptq",
        "--group-size", "16", "--samples", "6", "--length", "32", "--device", "cpu",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    strict = [*command, "--gate", "-99"]
    done = subprocess.run(strict, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "--force" in done.stderr
    done = subprocess.run([*strict, "--force"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    assert loaded(tmp_path / "out") is not None


def test_static_scales_of_inputs_are_read_back(tmp_path: Path) -> None:
    source = original(tmp_path / "model")
    recipe = Recipe("int8", Grid(8), "tensor")
    quantize(source, "tiny", tmp_path / "out", recipe, OPTIONS)
    weight = loaded(tmp_path / "out").layers[0].mlp.down.weight
    assert weight.input_scale is not None
    assert weight.format.inputs == "tensor"


def test_stored_and_simulated_numbers_are_one(tmp_path: Path) -> None:
    """Reading a written layout gives the rounded values."""
    torch.manual_seed(0)
    weight = torch.randn(48, 96)
    source = OriginalModel(
        original(tmp_path / "model", "llama"), torch.device("cpu"), torch.float32
    )
    for choices in RECIPES.values():
        recipe = Recipe.with_defaults(**choices)
        rounded = round_to(weight[:, :48], find_scales(weight[:, :48], recipe.grid, torch.float16))
        stored = stored_tensors(rounded, recipe, torch.float16)
        name = "model.layers.0.self_attn.q_proj"
        tensors = {f"{name}.{key}": tensor for key, tensor in stored.items()}
        infos = {key: TensorInfo(t.dtype, tuple(t.shape)) for key, t in tensors.items()}
        quantization = read_quantization(recipe.settings([]), source.spec, infos)
        scheme = quantization.scheme_for("layers.0.attention.qkv.q", torch.float32)
        own = Weight.empty(scheme.format, 48, 48, torch.device("cpu"))
        share = ProjectionShare((0, 48), (0, 48), 48, 48)
        for each in scheme.stored:
            tensor = tensors[f"{name}.{each.name}"]
            each.write(own, tensor if tensor.ndim else tensor[None], 0, share)
        torch.testing.assert_close(
            dequantize(own, torch.float32), rounded.dequantized(), rtol=1e-6, atol=1e-7
        )
