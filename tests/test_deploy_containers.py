"""The Compose file and the Kubernetes manifests say what the processes understand: ports, flags, probes, graces.

Reads the files alone; `make test-containers` runs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from decode_service.config import ROLE as DECODE
from prefill_service.config import ROLE as PREFILL
from router import border
from router.config import Settings
from router.config import parse as router_flags
from wire.options import parse as worker_flags
from wire.worker import FLUSH_S

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BASE = ROOT / "deploy" / "kubernetes" / "base"
COMMANDS = {"router": "router", "prefill": "prefill_service", "decode": "decode_service"}
PORTS = {"router": 50051, "prefill": PREFILL.port, "decode": DECODE.port}
READY = {"router": border.SERVICE, "prefill": PREFILL.service, "decode": DECODE.service}


def settings_of(role: str, environment: dict[str, str], token: Path) -> Any:
    """What the process makes of these variables. Raises what it would say to a user."""
    environment = environment | {"PAGEWIRE_TOKEN_FILE": str(token), "PAGEWIRE_HOST": "0.0.0.0"}
    if role == "router":
        return router_flags([], environment)
    return worker_flags(PREFILL if role == "prefill" else DECODE, [], environment)


def interpolated(values: dict[str, str]) -> dict[str, str]:
    """Compose's ${NAME:-default} where no NAME is set."""
    return {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value)) for name, value in values.items()}


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("a-token")
    return file


# ---- docker-compose.yml -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["router", "prefill", "decode", "prefill-gpu", "decode-gpu"])
def test_each_process_of_the_compose_file_reads_its_variables_and_is_asked_at_its_port(name: str, token: Path) -> None:
    service, role = SERVICES[name], name.removesuffix("-gpu")
    assert service["command"] == ["python", "-m", COMMANDS[role]]
    settings = settings_of(role, interpolated(service["environment"]), token)
    probe = service["healthcheck"]["test"]
    assert probe[:3] == ["CMD", "pagewire", "health"]
    if role == "router":
        assert probe[3:] == [], "the router's address and service are the command's own defaults"
        assert isinstance(settings, Settings)
        assert [target for _, target in settings.targets] == [f"prefill:{PREFILL.port}", f"decode:{DECODE.port}"]
    else:
        assert probe[3:] == ["--address", f"127.0.0.1:{PORTS[role]}", "--service", READY[role]]
    assert seconds(service["stop_grace_period"]) > settings.grace + FLUSH_S


def test_the_containers_of_a_card_answer_to_the_same_names() -> None:
    for role in ("prefill", "decode"):
        assert SERVICES[f"{role}-gpu"]["networks"]["default"]["aliases"] == [role]


def test_each_image_is_built_by_one_service_so_that_run_finds_the_one_that_the_router_has() -> None:
    """Built by several, it would be several images: `docker compose run` then replaces a router that serves."""
    ours = {name: service for name, service in SERVICES.items() if "PAGEWIRE_IMAGE" in service["image"]}
    for image in {service["image"] for service in ours.values()}:
        (builder,) = (name for name, each in ours.items() if each["image"] == image and "build" in each)
        others = [each for name, each in ours.items() if each["image"] == image and name != builder]
        assert all(each["pull_policy"] == "never" for each in others), "no registry has it"
        if image.endswith(":cpu"):
            assert all("token" in each["depends_on"] or "router" in each["depends_on"] for each in others)


def test_only_this_machine_reaches_the_published_ports() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_the_compose_file_holds_no_secret_and_lets_nobody_in_without_one() -> None:
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    assert "--insecure" not in text and "PAGEWIRE_INSECURE" not in text
    for name in ("router", "prefill", "decode", "loadtest"):
        assert SERVICES[name]["environment"]["PAGEWIRE_TOKEN_FILE"] == "/run/pagewire/token"
        assert "token:/run/pagewire:ro" in SERVICES[name]["volumes"]


def test_every_profile_that_the_readme_names_is_there() -> None:
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
    assert profiles == {"gpu", "loadtest", "monitoring"}
    section = (ROOT / "README.md").read_text("utf-8").split("## Containers")[1].split("\n## ")[0]
    for service in re.findall(r"docker compose (?:run --rm|exec(?: -T)?) ([a-z-]+)", section):
        assert service in SERVICES


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match
    return float(match[1])


# ---- deploy/kubernetes --------------------------------------------------------------------------------------------


def documents() -> Iterator[dict[str, Any]]:
    for file in sorted(BASE.glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text("utf-8"))


def deployment(role: str) -> dict[str, Any]:
    return next(
        each for each in documents() if each["kind"] == "Deployment" and each["metadata"]["name"].endswith(role)
    )


def environment(container: dict[str, Any]) -> dict[str, str]:
    """As the kubelet sets it in a pod at 10.0.0.1 that may use two cores."""
    from_pod = {"status.podIP": "10.0.0.1", "limits.cpu": "2"}
    values: dict[str, str] = {}
    for each in container["env"]:
        source = each.get("valueFrom", {})
        key = source.get("fieldRef", {}).get("fieldPath") or source.get("resourceFieldRef", {}).get("resource")
        value = from_pod[key] if key else each["value"]
        values[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], value)
    return values


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_each_pod_reads_its_variables_and_is_probed_at_its_port(role: str, token: Path) -> None:
    pod = deployment(role)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", COMMANDS[role]]
    settings = settings_of(role, environment(container), token)
    assert container["livenessProbe"]["grpc"] == {"port": PORTS[role]}
    assert container["readinessProbe"]["grpc"] == {"port": PORTS[role], "service": READY[role]}
    if role == "router":
        services = {each["metadata"]["name"]: each["spec"] for each in documents() if each["kind"] == "Service"}
        for _, target in settings.targets:
            name, _, port = target.partition(":")
            assert services[name]["clusterIP"] == "None" and int(port) in {
                each["port"] for each in services[name]["ports"]
            }
    else:
        assert settings.advertise == f"10.0.0.1:{PORTS[role]}" and settings.threads == 2


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_pod_is_not_killed_before_its_drain_is_over(role: str) -> None:
    pod = deployment(role)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    waits = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    needed = float(waits[1]) + float(environment(container)["PAGEWIRE_GRACE"]) + FLUSH_S
    assert pod["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_pod_gets_no_variables_of_services_no_root_and_no_api_token(role: str) -> None:
    pod = deployment(role)["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False, "PAGEWIRE_PORT of a Service named pagewire would be taken for --port"
    assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert not [each for each in documents() if each["kind"] == "Secret"], "whoever deploys makes the token"
