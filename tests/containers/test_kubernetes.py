"""deploy/kubernetes against Kubernetes' own schemas, as they are written and as kustomize puts them together.

The schemas come with the package kubernetes-validate: no cluster is asked.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"

pytestmark = pytest.mark.containers


def check(text: str) -> list[dict[str, Any]]:
    """Every object of it. Unknown fields are refused: a cluster would ignore them."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    objects = list(yaml.safe_load_all(text))
    for each in objects:
        validate.validate(each, validate.latest_version(), strict=True)
    return objects


def render(name: str) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl is here to put the overlay together")
    ran = subprocess.run(["kubectl", "kustomize", str(MANIFESTS / name)], capture_output=True, text=True, check=False)
    if "unknown field" in ran.stderr:
        pytest.skip(f"this kubectl is too old: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    return check(ran.stdout)


@pytest.mark.parametrize("file", ["router.yaml", "prefill.yaml", "decode.yaml"])
def test_every_object_fits_its_schema(file: str) -> None:
    assert check((MANIFESTS / "base" / file).read_text("utf-8"))


def test_the_base_is_three_deployments_behind_three_services() -> None:
    kinds = sorted(each["kind"] for each in render("base"))
    assert kinds == ["Deployment"] * 3 + ["PodDisruptionBudget"] * 2 + ["Service"] * 3


def test_with_cards_each_worker_has_one_and_the_router_none() -> None:
    found = {each["metadata"]["name"]: each for each in render("gpu") if each["kind"] == "Deployment"}
    for role in ("prefill", "decode"):
        (container,) = found[f"pagewire-{role}"]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "pagewire:cuda" and container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert "PAGEWIRE_KV_MEMORY" not in {each["name"] for each in container["env"]}
        assert container["command"] == ["python", "-m", f"{role}_service"], "what is not changed stays"
    (router,) = found["pagewire-router"]["spec"]["template"]["spec"]["containers"]
    assert router["image"] == "pagewire:cpu" and "nvidia.com/gpu" not in router["resources"]["limits"]
