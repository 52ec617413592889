"""`quire doctor`: what is wrong with a machine, and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire.cli.help import AsJson
from quire.cli.progress import counted
from quire.cli.serve import check_folder
from quire.config import EngineArgs
from quire.errors import ConfigError, ModelError
from quire.server.args import ServerArgs
from quire.server.process.listen import bind

if TYPE_CHECKING:
    import torch

# Functions import PyTorch and Triton, because the command must run where they cannot be imported.

_LEAST_PYTHON = (3, 11)
_LEAST_TORCH = (2, 11)
_LEAST_MEMORY = 2e9
"""Bytes of free memory with which the embedded model starts."""
_LEAST_DISK = 1e9
_LEAST_CAPABILITY = (7, 5)

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds the outcome of a check.

    Attributes:
        subject: the thing that was checked.
        status: a problem keeps Quire from serving; a warning does not.
        found: the state, in words.
        advice: how to solve it; "" if all is well.
    """

    subject: str
    status: Status
    found: str
    advice: str = ""


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A model's folder to look at, too.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    json: AsJson = False,
) -> None:
    """Prints all findings. The exit status is 1 if one of them is a problem."""
    findings = list(examine(model, host, port))
    if json:
        typer.echo(dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)


def examine(model: str | None, host: str, port: int) -> Iterator[Finding]:
    yield python()
    pytorch = torch_package()
    yield pytorch
    if pytorch.status != "problem":
        yield from gpus()
        yield triton()
    yield memory()
    for subject, folder in folders():
        yield disk(subject, folder)
    yield address(host, port)
    if model is not None and pytorch.status != "problem":
        yield model_folder(model)


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _LEAST_PYTHON:
        return Finding("Python", "problem", version, "use Python 3.11 or newer")
    return Finding("Python", "ok", version)


def torch_package() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("PyTorch", "problem", f"cannot be imported: {error}", "pip install torch")
    found = torch.__version__
    version = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if version < _LEAST_TORCH:
        return Finding("PyTorch", "problem", found, "pip install --upgrade 'torch>=2.11'")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    return Finding("PyTorch", "ok", f"{found}, {built}")


def gpus() -> Iterator[Finding]:
    """Looks for a GPU that is there and cannot be used, and at each that can."""
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield gpu(index, torch.cuda.get_device_properties(index))
        return
    driver = Path("/proc/driver/nvidia/version")
    if not driver.exists() and shutil.which("nvidia-smi") is None:
        yield Finding("GPU", "ok", "none: Quire runs on the CPU")
    elif torch.version.cuda is None:
        yield Finding(
            "GPU",
            "problem",
            "the machine has a GPU, but this PyTorch is built for CPUs only",
            "install PyTorch with CUDA: pip install --force-reinstall torch",
        )
    else:
        yield Finding(
            "GPU",
            "problem",
            f"PyTorch for CUDA {torch.version.cuda} cannot use the driver",
            "see what nvidia-smi says: update the driver to one for that CUDA version; in a "
            "container, start it with --gpus all",
        )


def gpu(index: int, card: torch.cuda._CudaDeviceProperties) -> Finding:
    import torch

    subject = f"GPU {index}"
    free, total = torch.cuda.mem_get_info(index)
    found = f"{card.name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    if (card.major, card.minor) < _LEAST_CAPABILITY:
        return Finding(
            subject, "problem", f"{found}, sm_{card.major}{card.minor}",
            "the kernels need sm_75 or newer: use --device cpu",
        )  # fmt: skip
    if free < total / 2:
        return Finding(
            subject, "warning", found,
            "end what else uses it (nvidia-smi), or lower --gpu-memory-utilization",
        )  # fmt: skip
    return Finding(subject, "ok", found)


def triton() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("Triton", "ok", "not needed on a CPU")
    if importlib.util.find_spec("triton") is None:
        return Finding("Triton", "problem", "not installed", "pip install triton")
    from triton import __version__ as version

    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return Finding(
            "Triton", "problem", f"{version}, and no C compiler, with which it builds launchers",
            "install one, as with apt-get install gcc",
        )  # fmt: skip
    from quire.ops.triton.launch import gluon_missing

    missing = gluon_missing(version)
    on_hopper = any(
        torch.cuda.get_device_capability(index) == (9, 0)
        for index in range(torch.cuda.device_count())
    )
    if missing is not None and on_hopper:
        found, _, advice = missing.partition("; ")
        return Finding("Triton", "warning", found, advice)
    return Finding("Triton", "ok", version)


def memory() -> Finding:
    free = available_memory()
    if free is None:
        return Finding("memory", "ok", "not known on this system")
    found = f"{free / 1e9:.1f} GB available"
    if free < _LEAST_MEMORY:
        return Finding(
            "memory", "problem", found, "end other programs, or lower --kv-cache-gb on a CPU"
        )
    return Finding("memory", "ok", found)


def available_memory() -> int | None:
    """Returns bytes that programs can still take; None where Linux's account of it is missing."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def folders() -> Iterator[tuple[str, Path]]:
    """Yields the folders that Quire writes to, each with its purpose."""
    home = Path.home()
    hub = os.environ.get("HF_HOME") or home / ".cache" / "huggingface"
    yield "models from the hub", Path(hub)
    yield "compiled kernels", Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton")
    yield "sockets", Path(tempfile.gettempdir())


def disk(subject: str, folder: Path) -> Finding:
    """Looks at the folder, or at the nearest one above it that exists."""
    name = f"disk: {subject}"
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(place, os.W_OK):
        return Finding(name, "problem", f"{place} cannot be written", f"chown or chmod {place}")
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free in {place}"
    if free < _LEAST_DISK:
        return Finding(name, "problem", found, "make room, or set another folder: see --help")
    return Finding(name, "ok", found)


def address(host: str, port: int) -> Finding:
    subject = f"{host}:{port}"
    try:
        sock = bind(ServerArgs(host=host, port=port))
        with sock:
            sock.listen()
    except ConfigError as error:
        return _blamed(subject, error, "choose another with --host and --port")
    except OSError as error:
        return Finding(subject, "problem", str(error.strerror), "choose another port with --port")
    return Finding(subject, "ok", "free")


def model_folder(model: str) -> Finding:
    try:
        check_folder(EngineArgs(model=model))
    except ModelError as error:
        return _blamed(
            model, error, "name a folder with config.json and weights, or a hub id (ORG/NAME)"
        )
    return Finding(model, "ok", "can be loaded" if Path(model).exists() else "a hub id")


def _blamed(subject: str, error: Exception, otherwise: str) -> Finding:
    """Returns a problem; an error's text after its semicolon is the advice.

    Args:
        subject: the thing that was checked.
        error: the error of the check.
        otherwise: advice for an error without a semicolon.
    """
    found, _, advice = str(error).partition("; ")
    return Finding(subject, "problem", found, advice or otherwise)


def _print(findings: list[Finding]) -> None:
    style = {"ok": "green", "warning": "yellow", "problem": "bold red"}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(
            Text(finding.status, style[finding.status]), Text(finding.subject), Text(finding.found)
        )
        if finding.advice:
            table.add_row("", "", Text(f"→ {finding.advice}"))
    console = Console(highlight=False)
    console.print(table)
    problems = sum(finding.status == "problem" for finding in findings)
    console.print(f"\n{counted(problems, 'problem')}" if problems else "\nQuire can serve here.")
