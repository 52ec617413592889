"""Late imports: torch is imported only when an engine is built."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "tokenizers", "fastapi", "uvicorn")


@pytest.mark.parametrize(
    "code",
    [
        "import quire",
        "from quire import SamplingParams",
        "from quire.config import EngineArgs",
        "import quire.cli.main",
        "import quire.scheduler.scheduler, quire.cache",
    ],
)
def test_light_imports(code: str) -> None:
    check = f"{code}\nimport sys\nprint(*[n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_server_needs_no_torch() -> None:
    """The API process starts the engine's process, and should do so quickly."""
    check = (
        "import quire.cli.serve, quire.engine.process.client, quire.server.app\n"
        "import sys\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_help_loads_nothing_heavy() -> None:
    check = (
        "import sys\nfrom quire.cli.main import app\n"
        "for command in ([], ['serve'], ['bench', 'throughput']):\n"
        "    try: app([*command, '--help'])\n"
        "    except SystemExit as end: assert not end.code\n"
        f"print('heavy:', *[n for n in {HEAVY} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy:"


def test_unknown_attribute() -> None:
    import quire

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quire.nothing
