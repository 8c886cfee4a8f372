"""docker-compose.yml with two prefill and two decode containers on SmolLM2, built and run as the README says.

The base image is made by debootstrap, since no registry is needed for anything here. The tests share one deployment
and run in the order of this file: each leaves it as it found it, or says what it took away.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from docker_engine import Cannot, Docker, docker_engine

ROOT = Path(__file__).parents[2]
PROJECT = "pagewire-containers-test"
BASE = "pagewire-containers-test-base"
IMAGE = f"{PROJECT}:cpu"
MONITOR = f"{PROJECT}:prometheus"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
QUESTION = "What is the capital of France?"
REQUESTS = 200
READY_S = 300.0
TOKENS_OF_A_LONG_ANSWER = 48
GRACE_S = 120  # more than the default: these containers share a machine with whatever else it does

# In place of the published image: Debian's Prometheus, which starts and is told where its files are as that one.
PROMETHEUS = f"""
FROM {BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus && install -d -o nobody /prometheus
USER nobody
WORKDIR /prometheus
ENTRYPOINT ["prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""

# No timeout of pytest's, which would end the process and leave the engine: each command has its own, `make` has one
# for all, and both let the fixtures take everything away.
pytestmark = [pytest.mark.containers, pytest.mark.timeout(0)]


class Compose:
    """docker-compose in a copy of the repository, on ports that are free on this machine."""

    def __init__(self, docker: Docker, folder: Path) -> None:
        self.docker = docker
        self._folder = folder
        grpc_port, self.http_port, self.prometheus_port = _free_ports(3)
        self._also = {
            "PAGEWIRE_PORT": str(grpc_port),
            "PAGEWIRE_HTTP_PORT": str(self.http_port),
            "PAGEWIRE_PROMETHEUS_PORT": str(self.prometheus_port),
            "PAGEWIRE_IMAGE": PROJECT,
            "PAGEWIRE_KV_MEMORY": "512MiB",
            "PAGEWIRE_WORKERS_ON_HOST": "4",
        }
        self.token = ""

    def __call__(self, *arguments: str, timeout: float = 120.0) -> str:
        command = ["docker-compose", "--project-name", PROJECT, "--no-ansi", *arguments]
        return self.docker.run(command, timeout=timeout, cwd=self._folder, also=self._also)

    def up(self, **scale: int) -> None:
        """Returns when every container is healthy, as --wait of a newer compose does."""
        counts = [part for service, count in scale.items() for part in ("--scale", f"{service}={count}")]
        self("up", "--detach", "--no-build", *counts, timeout=READY_S)
        services = {"router": 1, **scale}
        wait_until(
            lambda: all(self.healthy(service) == count for service, count in services.items()),
            READY_S,
            lambda: self("ps") + self("logs", "--tail", "20"),
        )
        self.token = self("exec", "-T", "router", "cat", "/run/pagewire/token").strip()

    def containers(self, service: str, *filters: str) -> list[str]:
        also = [part for each in filters for part in ("--filter", each)]
        label = f"label=com.docker.compose.service={service}"
        named = self.docker("ps", "--all", "--filter", f"label=com.docker.compose.project={PROJECT}",
                            "--filter", label, *also, "--format", "{{.Names}}")  # fmt: skip
        return sorted(named.split())

    def healthy(self, service: str) -> int:
        return len(self.containers(service, "health=healthy"))

    def workers(self) -> str:
        return self("exec", "-T", "router", "pagewire", "ps")

    def state(self, container: str) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.docker("inspect", "--format", "{{json .State}}", container))
        return state

    def scraped(self, health: str) -> list[str]:
        """The job of each target that Prometheus finds so; while that starts, none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.prometheus_port}/api/v1/targets", timeout=5) as answer:
                targets = json.load(answer)["data"]["activeTargets"]
        except OSError:
            return []
        return [each["labels"]["job"] for each in targets if each["health"] == health]

    def ask(self, **fields: Any) -> dict[str, Any]:
        """One OpenAI request through the published port."""
        with self._post(fields) as answer:
            whole: dict[str, Any] = json.load(answer)
        return whole

    def stream(self, **fields: Any) -> Iterator[str]:
        """The same as events: JSON, and the usage in the last one before [DONE]."""
        with self._post({**fields, "stream": True, "stream_options": {"include_usage": True}}) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").decode().strip()

    def _post(self, fields: dict[str, Any]) -> Any:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16, **fields}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"},
        )
        return urllib.request.urlopen(request, timeout=GRACE_S)


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    try:
        with docker_engine() as engine:
            yield engine
    except Cannot as reason:
        pytest.skip(f"NO CONTAINER WAS TESTED: {reason}")


@pytest.fixture(scope="module")
def compose(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """The deployment, with two workers of each stage. Takes everything away again, the images too."""
    folder = tmp_path_factory.mktemp("clone")
    compose = Compose(docker, folder)
    try:
        _base_image(docker, folder)
        _clone(folder)
        _override(folder)
        began = time.monotonic()
        _build(docker, folder)
        built = time.monotonic()
        compose.up(prefill=2, decode=2)
        print(f"\nbuilt in {built - began:.0f} s, ready after {time.monotonic() - built:.0f} s more")
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "5")
        left = docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}")
        left += docker("volume", "ls", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}")
        if not docker.ends_with_tests:
            docker("rmi", "--force", IMAGE, MONITOR, BASE)
    assert not left, "compose down leaves nothing"


# ---- the tests ----------------------------------------------------------------------------------------------------


def test_the_first_token_comes_from_two_containers_of_each_stage(compose: Compose) -> None:
    assert "Paris" in compose("exec", "-T", "router", "pagewire", "generate", QUESTION)
    assert len(re.findall(r"^prefill .* accepting", compose.workers(), re.MULTILINE)) == 2
    assert len(re.findall(r"^decode .* accepting", compose.workers(), re.MULTILINE)) == 2


def test_the_image_has_no_compiler_no_root_and_no_secret(compose: Compose) -> None:
    who = compose("exec", "-T", "decode", "sh", "-c", "id -u; command -v gcc nvcc cc; touch /opt/pagewire/x || echo no")
    assert who.split() == ["10001", "no"]
    settings = json.loads(compose.docker("inspect", "--format", "{{json .Config}}", IMAGE))
    assert settings["User"] == "10001:10001" and settings["Cmd"] == ["python", "-m", "router"]
    assert settings["Healthcheck"]["Test"] == ["CMD", "pagewire", "health"]
    assert settings["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert compose.token not in json.dumps(settings) + compose.docker("history", "--no-trunc", IMAGE)


def test_the_published_port_answers_whoever_has_the_token(compose: Compose) -> None:
    answer = compose.ask()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    compose.token, token = "another", compose.token
    try:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            compose.ask()
    finally:
        compose.token = token
    published = compose.docker(
        "ps", "--filter", f"label=com.docker.compose.project={PROJECT}", "--format", "{{.Ports}}"
    )
    assert "0.0.0.0:" not in published and ":::" not in published, "only this machine reaches it"


def test_prometheus_finds_every_container_by_its_name_and_reads_it_with_the_token(compose: Compose) -> None:
    """The profile `monitoring` with deploy/prometheus.yml; Grafana's image is not to be had without a registry."""
    wanted = ["pagewire-decode"] * 2 + ["pagewire-prefill"] * 2 + ["pagewire-router"]
    compose("--profile", "monitoring", "up", "--detach", "--no-build", "prometheus")
    try:
        wait_until(lambda: sorted(compose.scraped("up")) == wanted, 60, lambda: compose.scraped("down"))
    finally:
        compose("--profile", "monitoring", "rm", "--stop", "--force", "prometheus")


def test_no_request_fails_when_a_decode_container_is_killed(compose: Compose) -> None:
    load = LoadTest(compose)
    load.start()
    victim = compose.containers("decode")[0]
    wait_until(lambda: _running(compose, "decode") > 0, 60, compose.workers)
    time.sleep(3.0)
    assert load.is_alive(), "the kill came too late"
    compose.docker("kill", victim)
    load.join()
    print(load.printed)
    assert not load.error
    assert re.search(rf"Successful requests:\s+{REQUESTS}\b", load.printed)
    assert compose.state(victim)["ExitCode"] == 137


def test_another_container_is_found_by_its_name_alone(compose: Compose) -> None:
    """The one that was killed comes back, by another address perhaps."""
    compose.up(prefill=2, decode=2)
    both = r"^decode .* accepting"
    wait_until(lambda: len(re.findall(both, compose.workers(), re.MULTILINE)) == 2, 30, compose.workers)


def test_a_worker_that_dies_by_itself_is_started_again(compose: Compose) -> None:
    container = compose.containers("prefill")[0]
    os.kill(int(compose.state(container)["Pid"]), signal.SIGKILL)
    restarted = ["inspect", "--format", "{{.RestartCount}} {{.State.Health.Status}}", container]
    wait_until(lambda: compose.docker(*restarted).split() == ["1", "healthy"], 60, compose.workers)
    assert "Paris" in compose.ask()["choices"][0]["message"]["content"]


def test_stop_drains_a_worker_and_the_router_at_once(compose: Compose) -> None:
    """The answer that runs goes on to its end, on whichever worker is left."""
    pieces: list[str] = []
    first = threading.Event()

    def read() -> None:
        for piece in compose.stream(max_tokens=TOKENS_OF_A_LONG_ANSWER, ignore_eos=True):
            pieces.append(piece)
            first.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert first.wait(60)
    stopped = [compose.containers("decode")[0], compose.containers("router")[0]]
    compose.docker("stop", "--time", str(GRACE_S + 10), *stopped, timeout=GRACE_S + 60)
    reading.join()
    assert [compose.state(container)["ExitCode"] for container in stopped] == [0, 0]
    assert all("drain" in compose.docker("logs", container) for container in stopped)
    assert pieces[-1] == "[DONE]"
    assert json.loads(pieces[-2])["usage"]["completion_tokens"] == TOKENS_OF_A_LONG_ANSWER


# ---- their means --------------------------------------------------------------------------------------------------


class LoadTest(threading.Thread):
    """The load-test container with short requests. `error` is what it died of."""

    def __init__(self, compose: Compose) -> None:
        super().__init__(name="loadtest")
        self._compose = compose
        self.printed = ""
        self.error = ""

    def run(self) -> None:
        short = ["--random-input-len=48", "--random-output-len=12", "--max-concurrency=8"]
        load = ["pagewire", "bench", "serve", "--protocol=grpc", "--address=router:50051", f"--num-prompts={REQUESTS}"]
        try:
            self.printed = self._compose("run", "--rm", "-T", "loadtest", *load, *short, timeout=600)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self.error = str(error)


def wait_until(condition: Any, seconds: float, explain: Any) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s:\n{explain()}")
        time.sleep(0.5)


def _running(compose: Compose, role: str) -> int:
    """Sequences that its workers have, by the fourth column of `pagewire ps`."""
    rows = re.findall(rf"^{role}\s+\S+\s+(?:accepting|not used)\s+(\d+)", compose.workers(), re.MULTILINE)
    return sum(map(int, rows))


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _base_image(docker: Docker, folder: Path) -> None:
    """Debian with Python, and the certificates of this machine, by which pip reaches its index."""
    base = folder / "base"
    packages = "python3,python3-venv,ca-certificates"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(base)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=600,
        check=True,
    )
    shutil.rmtree(base / "var/cache/apt")
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, base / "etc/ssl/certs")
    docker.load_base(base, BASE)
    shutil.rmtree(base)


def _clone(folder: Path) -> None:
    """What git has of this tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    for name in listed.decode().split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def _override(folder: Path) -> None:
    """Compose reads this file beside the other one."""
    longer = {"environment": {"PAGEWIRE_GRACE": str(GRACE_S)}}
    services = {"router": longer, "prefill": longer, "decode": longer, "prometheus": {"image": MONITOR}}
    (folder / "docker-compose.override.yml").write_text(json.dumps({"services": services}))


def _build(docker: Docker, folder: Path) -> None:
    arguments = {"BASE_IMAGE": BASE}
    if CERTIFICATES.exists():
        arguments["PIP_CERT"] = str(CERTIFICATES)
    if _wheel_of_torch(folder / "wheels"):
        arguments["TORCH_INDEX"] = ""
    given = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    build = ["build", "--network", "host"]
    docker(*build, "--tag", IMAGE, *given, str(folder), timeout=900)
    (folder / "monitor").mkdir()
    (folder / "monitor" / "Dockerfile").write_text(PROMETHEUS)
    docker(*build, "--tag", MONITOR, str(folder / "monitor"), timeout=300)


def _wheel_of_torch(folder: Path) -> bool:
    """Whether pip is told on this machine of a wheel without CUDA, which a build would not see: put beside it then."""
    wanted = next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("torch=="))
    from_disk = ["--no-index", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]  # Debian bookworm's Python
    command = [sys.executable, "-m", "pip", "--quiet", "download", *from_disk, "--dest", str(folder), wanted]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
