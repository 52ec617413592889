"""The chart as Helm renders it, and what Kubernetes' schemas say of that.

Needs helm-python-sdk and kubernetes-validate, which together are too large for the extra `dev`;
deploy.yml runs Helm and kubeconform themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python")
kubernetes = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "quire"
SETS = {
    file.stem.removesuffix("-values"): yaml.safe_load(file.read_text())
    for file in sorted((CHART / "ci").glob("*-values.yaml"))
}
IMAGE = {"image": {"repository": "registry.example/quire"}}


def objects(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the chart's objects for these values, by kind."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="llm", namespace="models")
    found = [yaml.safe_load(text) for name, text in texts.items() if name.endswith(".yaml")]
    return {made["kind"]: made for made in found if made}


@pytest.mark.parametrize("version", ["1.29", "1.33"])
@pytest.mark.parametrize("name", SETS)
def test_objects_are_valid(name: str, version: str) -> None:
    messages = helm.lint(CHART, SETS[name], strict=True)["messages"]
    assert {message["error"] for message in messages} <= {"icon is recommended"}
    for kind, made in objects(SETS[name]).items():
        if kind != "PodMonitor":  # Of the Prometheus operator, not of Kubernetes.
            kubernetes.validate(made, version, strict=True)


def test_the_image_is_required() -> None:
    with pytest.raises(helm.HelmRenderError, match="where the image was pushed"):
        objects({})


@pytest.mark.parametrize("name", ["host", "port", "model", "api_key", "drain_timeout"])
def test_settings_of_the_chart_are_refused(name: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=name):
        objects({**IMAGE, "settings": {name: "1"}})


def test_scaling_by_the_queue() -> None:
    plain = objects(IMAGE)
    assert "HorizontalPodAutoscaler" not in plain
    assert plain["Deployment"]["spec"]["replicas"] == 1
    scaled = objects({**IMAGE, "autoscaling": {"enabled": True, "openRequests": 32}})
    assert "replicas" not in scaled["Deployment"]["spec"]
    metrics = scaled["HorizontalPodAutoscaler"]["spec"]["metrics"]
    names = [metric["pods"]["metric"]["name"] for metric in metrics]
    assert names == ["quire_requests_waiting", "quire_open_requests"]


def test_gpus_and_keys() -> None:
    values = {**IMAGE, "gpus": 2, "model": "my/model", "auth": {"existingSecret": "keys"}}
    pod = objects(values)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"secretName": "keys"}.items() <= next(
        volume["secret"].items() for volume in pod["volumes"] if "secret" in volume
    )
