"""Image, compose file, chart, unit and their page agree with the code."""

from __future__ import annotations

import itertools
import json
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli.settings import settings_of
from quire.config import EngineArgs
from quire.server.args import ServerArgs
from quire.server.openapi import ROUTES
from quire.server.routes import PUBLIC_PATHS
from tools import check_package

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "quire"
SETTINGS = {s.name: s for schema in (EngineArgs, ServerArgs) for s in settings_of(schema)}
DRAIN_TIMEOUT = SETTINGS["drain_timeout"].default
PORT = SETTINGS["port"].default
USER = 10001


def read(path: str) -> str:
    return (ROOT / path).read_text()


def load(path: str) -> Any:
    return yaml.safe_load(read(path))


DOCKERFILE = read("Dockerfile")
COMPOSE = load("docker-compose.yml")
PAGE = read("docs/deploy.md")
SERVERS = ("quire", "quire-gpu")
TEMPLATES = {file.name: file.read_text() for file in (CHART / "templates").iterdir()}
DEPLOYMENT = TEMPLATES["deployment.yaml"]


def variables(text: str) -> set[str]:
    return set(re.findall(r"\bQUIRE_[A-Z_]+\b", text))


def flags(text: str) -> set[str]:
    return set(re.findall(r"--([a-z][a-z-]+)", text))


def test_files_are_yaml() -> None:
    files = [*(ROOT / "deploy").rglob("*.y*ml"), *(ROOT / ".github/workflows").glob("*.yml")]
    for file in files:
        if file.parent.name != "templates":
            assert yaml.safe_load(file.read_text()), file


def test_versions() -> None:
    (version,) = re.findall(r'^__version__ = "(.+)"$', read("src/quire/version.py"), re.MULTILINE)
    chart = load("deploy/helm/quire/Chart.yaml")
    assert chart["version"] == chart["appVersion"] == version
    assert set(re.findall(r"quire[:-](\d+\.\d+\.\d+)", PAGE)) == {version}
    dynamic = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["dynamic"]
    assert dynamic == {"version": {"attr": "quire.version.__version__"}}


def test_the_release_compares_the_tag_with_the_version() -> None:
    jobs = load(".github/workflows/release.yml")["jobs"]
    assert "src/quire/version.py" in jobs["version"]["steps"][-1]["run"]
    assert jobs["package"]["needs"] == "version"
    assert all(job.get("needs") for name, job in jobs.items() if name != "version")
    assert jobs["index"]["permissions"] == {"id-token": "write"}
    called = {job["uses"] for job in jobs.values() if "uses" in job}
    assert all((ROOT / path).is_file() for path in called)


@pytest.mark.parametrize(
    "text",
    [
        DOCKERFILE,
        read("docker-compose.yml"),
        PAGE,
        DEPLOYMENT,
        read("deploy/systemd/quire.service"),
    ],
    ids=["Dockerfile", "compose", "page", "chart", "unit"],
)
def test_variables_are_settings(text: str) -> None:
    known = {setting.variable for setting in SETTINGS.values()}
    assert variables(text) - {"QUIRE_"} <= known


def test_flags_are_settings() -> None:
    """Checks the flags of `quire` commands, not those of other programs."""
    known = {name.replace("_", "-") for name in SETTINGS} | {"config"}
    commands = re.findall(r"^.*(?:quire serve| serve ).*$", PAGE, re.MULTILINE)
    commands = [line.partition("serve")[2] for line in commands]
    (unit,) = re.findall(r"^ExecStart=(.*)$", read("deploy/systemd/quire.service"), re.MULTILINE)
    (args,) = re.findall(r"^ +args: \[(.*)\]$", DEPLOYMENT, re.MULTILINE)
    found = set().union(*(flags(text) for text in (*commands, unit, args)))
    assert {"config", "drain-timeout"} <= found <= known


def test_the_image() -> None:
    env = dict(re.findall(r"(QUIRE_\w+|HOME)=(\S+)", DOCKERFILE))
    assert env == {"HOME": "/cache", "QUIRE_HOST": "0.0.0.0", "QUIRE_PORT": str(PORT)}
    assert f"EXPOSE {PORT}\n" in DOCKERFILE
    targets = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert targets[-2:] == ["cuda", "cpu"]
    ends = [stage.rstrip().splitlines()[-1] for stage in DOCKERFILE.split("\nFROM ")]
    assert ends[-2:] == [f"USER {USER}"] * 2
    (health,) = re.findall(r"^ +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    program = json.loads(health)[2]
    compile(program, "health", "exec")
    assert "'/ready'" in program
    assert "/ready" in PUBLIC_PATHS


def test_the_image_is_built_from_files_docker_sees() -> None:
    shown = {line[1:] for line in read(".dockerignore").splitlines() if line.startswith("!")}
    copied = {
        word
        for line in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for word in line.split()
    }
    assert copied == shown
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = set(re.findall(r"extras\['(\w+)'\]", DOCKERFILE))
    assert extras
    assert extras <= set(project["optional-dependencies"])
    assert re.search(r"^torch==", read("constraints.txt"), re.MULTILINE)


def test_compose_servers() -> None:
    for name in SERVERS:
        server = COMPOSE["services"][name]
        assert server["ports"] == [f"${{LISTEN:-127.0.0.1}}:{PORT}:{PORT}"]
        assert server["build"]["target"] in re.findall(r" AS (\S+)", DOCKERFILE)
        assert server["volumes"] == ["cache:/cache"]
        assert int(server["stop_grace_period"].removesuffix("s")) > DRAIN_TIMEOUT
        assert set(server["environment"]) - {"HF_TOKEN"} == variables(str(server["environment"]))
    profiles = [COMPOSE["services"][name]["profiles"] for name in SERVERS]
    assert profiles == [["cpu"], ["gpu"]]
    assert "COMPOSE_PROFILES=cpu" in read(".env").splitlines()


def test_compose_has_prefill_and_decode_apart() -> None:
    services = COMPOSE["services"]
    parts = {name: each for name, each in services.items() if each.get("profiles") == ["disagg"]}
    assert list(parts) == ["quire-prefill", "quire-decode", "quire-router"]
    for name in ("quire-prefill", "quire-decode"):
        role = name.removeprefix("quire-")
        assert parts[name]["command"] == ["serve", "--role", role]
        assert parts[name]["environment"]["QUIRE_ALLOWED_HOSTS"] == name
        words = parts["quire-router"]["command"]
        assert words[words.index(f"--{role}") + 1] == f"http://{name}:{PORT}"
    assert parts["quire-router"]["command"][0] == "route"


def test_compose_mounts_files_that_exist() -> None:
    mounts = [
        volume.split(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service["volumes"]
    ]
    for mount in mounts:
        assert (ROOT / mount).exists() if mount.startswith(".") else mount in COMPOSE["volumes"]
    keys = COMPOSE["secrets"]["keys"]["file"]
    assert tomllib.loads(read(keys.removeprefix("${KEYS:-").removesuffix("}"))) == {}
    assert (ROOT / "docs/grafana/quire.json").is_file()
    assert (
        "./docs/grafana:/var/lib/grafana/dashboards:ro" in COMPOSE["services"]["grafana"]["volumes"]
    )
    assert load("deploy/grafana/dashboards.yml")["providers"][0]["options"] == {
        "path": "/var/lib/grafana/dashboards"
    }


def test_prometheus_scrapes_the_server() -> None:
    (job,) = load("deploy/prometheus/prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"]
    assert target["targets"] == [f"quire:{PORT}"]
    for name in SERVERS:
        server = COMPOSE["services"][name]
        assert server["networks"] == {"default": {"aliases": ["quire"]}}
        assert "quire" in server["environment"]["QUIRE_ALLOWED_HOSTS"]
        assert server["environment"]["QUIRE_PUBLIC_METRICS"] == "true"
    assert "/metrics" in {route.path for route in ROUTES}
    assert "path: /metrics" in TEMPLATES["podmonitor.yaml"]


def test_probes() -> None:
    probes = dict(re.findall(r"(\w+)Probe:\n +httpGet: \{ path: (\S+), port: http \}", DEPLOYMENT))
    assert probes == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert set(probes.values()) <= PUBLIC_PATHS
    assert f"{{ name: http, containerPort: {PORT} }}" in DEPLOYMENT


def test_pods() -> None:
    # Otherwise Kubernetes sets QUIRE_PORT=tcp://... for a service called quire.
    assert "enableServiceLinks: false" in DEPLOYMENT
    assert DEPLOYMENT.count(str(USER)) == 3
    assert load("deploy/helm/quire/values.yaml")["drainTimeout"] == DRAIN_TIMEOUT


def test_values_of_templates_exist() -> None:
    values = load("deploy/helm/quire/values.yaml")
    used = {
        tuple(name.split("."))
        for name in re.findall(r"\.Values\.([\w.]+)", "".join(TEMPLATES.values()))
    }
    for path in used:
        node = values
        for name in path:
            assert name in node, path
            node = node[name]
    assert {path[0] for path in used} == set(values)


def test_sets_of_values() -> None:
    """Names of values are the chart's, and names of settings the server's."""
    values = load("deploy/helm/quire/values.yaml")
    files = sorted((CHART / "ci").glob("*-values.yaml"))
    for given in (values, *(yaml.safe_load(file.read_text()) for file in files)):
        for name, value in given.items():
            assert name in values
            if name == "settings":
                assert set(value) <= set(SETTINGS)
            elif isinstance(value, dict) and values[name]:
                assert set(value) <= set(values[name]) | {"requests", "limits"}
    matrix = load(".github/workflows/deploy.yml")["jobs"]["chart"]["strategy"]["matrix"]
    assert sorted(matrix["values"]) == [file.name.removesuffix("-values.yaml") for file in files]


def test_refused_settings_are_settings() -> None:
    (line,) = re.findall(r"range list (.*?) -", TEMPLATES["_helpers.tpl"])
    names = set(re.findall(r"\w+", line))
    assert names <= set(SETTINGS)
    assert names >= {"host", "port", "model", "drain_timeout"}


def test_the_unit() -> None:
    unit = read("deploy/systemd/quire.service")
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) > DRAIN_TIMEOUT
    assert set(load("deploy/systemd/quire.yaml")) <= set(SETTINGS)
    for path in re.findall(r"(/etc/quire/\S+|/opt/quire)", unit):
        assert path in PAGE
    # With a list of devices, as ProtectClock adds one before systemd 253, GPUs cannot be opened.
    listed = ("DeviceAllow", "DevicePolicy", "PrivateDevices", "ProtectClock")
    assert not [name for name in listed if re.search(rf"^{name}=", unit, re.MULTILINE)]


def test_files_of_the_page() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGE)
    assert links
    assert all((ROOT / "docs" / link).exists() for link in links)
    paths = re.findall(r"\b(?:deploy|tests|tools)/[\w./-]+\w", PAGE)
    assert all((ROOT / path).exists() for path in paths)
    given = re.findall(r"--set ([\w.]+)=", PAGE)
    values = load("deploy/helm/quire/values.yaml")
    for name in given:
        first, *rest = name.split(".")
        assert first in values
        assert all(part in {**SETTINGS, **values[first]} for part in rest)


def test_patterns_of_the_package_match_every_file() -> None:
    """Every data file matches a pattern of pyproject.toml; others would be missing in the wheel."""
    tool = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]
    package = ROOT / "src" / "quire"
    matched = [package.glob(pattern) for pattern in tool["package-data"]["quire"]]
    packed = {file.relative_to(package.parent).as_posix() for file in itertools.chain(*matched)}
    data = {name for name in check_package.package_files() if not name.endswith(".py")}
    assert data
    assert data <= packed


def test_check_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {"quire/config.py", "quire/py.typed"}
    monkeypatch.setattr(check_package, "package_files", lambda: wanted)
    wheel, source = tmp_path / "quire.whl", tmp_path / "quire-1.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("quire/config.py", "")
    with tarfile.open(source, "w:gz") as archive:
        for name in wanted:
            archive.addfile(tarfile.TarInfo(f"quire-1/src/{name}"))
    monkeypatch.setattr("sys.argv", ["check_package.py", str(source)])
    assert check_package.main() == 0
    monkeypatch.setattr("sys.argv", ["check_package.py", str(wheel), str(source)])
    assert check_package.main() == 1
    assert "lacks quire/py.typed" in capsys.readouterr().out
