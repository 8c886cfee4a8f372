"""What deploy/ ships, against Debian's Prometheus and a live `pagewire up` under load: `make test-monitoring`.

Every query of the Grafana dashboard has to return data, and every series that an alert names has to be there.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cluster import free_run, make_topology
from test_pagewire_cli import running_up

from pagewire.cli.deployment import Topology

pytestmark = pytest.mark.timeout(120)

DEPLOY = Path(__file__).parent.parent / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/pagewire.json").read_text())
RATE = "15s"  # what Grafana would put for $__rate_interval at a scrape each second is less
WARM_SECONDS = 40.0  # until every query has data


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """(panel, PromQL) of the whole dashboard."""
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", RATE))
        for panel in panels()
        for target in panel["targets"]
    ]


# ---- the files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "--syntax-only", "prometheus.yml"),
        ("check", "config", "prometheus-local.yml"),
        ("check", "rules", "alerts.yml"),
    ],
)
def test_promtool_finds_nothing_wrong(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Its panels have different ids, do not overlap, say what they show, and take their data from the variable."""
    every = DASHBOARD["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    for panel in panels():
        assert panel["description"].endswith(".") and panel["targets"], panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources), panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for one, other in combinations([panel["gridPos"] for panel in every], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart_x or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)
        assert one["x"] + one["w"] <= 24
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["type"]) == ("datasource", "datasource")


def test_provisioning_names_what_the_dashboard_and_compose_name() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    (folder,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/pagewire.yml").read_text())["providers"]
    compose = (DEPLOY.parent / "docker-compose.yml").read_text()
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    assert f"./deploy/grafana/dashboards:{folder['options']['path']}:ro" in compose
    for file in ("prometheus.yml", "alerts.yml"):
        assert f"./deploy/{file}:/etc/prometheus/{file}:ro" in compose


# ---- a live run ---------------------------------------------------------------------------------------------------


class Prometheus:
    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=5)

    def close(self) -> None:
        self._client.close()

    def ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def values(self, expression: str) -> list[float]:
        """One for each series that it returns now."""
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return [float(series["value"][1]) for series in answer["data"]["result"]]

    def names(self) -> set[str]:
        return set(self._client.get("/api/v1/label/__name__/values").json()["data"])


@contextmanager
def prometheus(config: Path, folder: Path) -> Iterator[Prometheus]:
    port = free_run(1)
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    server, deadline = Prometheus(port), time.monotonic() + 20
    try:
        while not server.ready():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "prometheus.log").read_text()
            time.sleep(0.1)
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(10)


def local_config(topology: Topology, folder: Path) -> Path:
    """deploy/prometheus-local.yml at this run's ports, once a second."""
    text = (DEPLOY / "prometheus-local.yml").read_text().replace("scrape_interval: 5s", "scrape_interval: 1s")
    workers = [http for _, _, _, http in topology.workers()]
    for shipped, port in zip((8000, 8061, 8071), (topology.http_port, *workers), strict=True):
        assert f"127.0.0.1:{shipped}" in text
        text = text.replace(f"127.0.0.1:{shipped}", f"127.0.0.1:{port}")
    (folder / "alerts.yml").write_text((DEPLOY / "alerts.yml").read_text())
    (folder / "prometheus.yml").write_text(text)
    return folder / "prometheus.yml"


@contextmanager
def load(topology: Topology) -> Iterator[None]:
    """Three clients that ask one question after another until the end; half of each prompt is everybody's."""
    over, failed = threading.Event(), list[str]()

    def ask(client: int) -> None:
        with httpx.Client(base_url=topology.url, trust_env=False, timeout=30) as http:
            for turn in range(10_000):
                if over.is_set():
                    return
                prompt = "the beginning that all of them share, " * 3 + f"client {client}, turn {turn}"
                answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24, "ignore_eos": True})
                if answer.status_code != 200:
                    failed.append(answer.text)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failed, failed[0]


def test_every_query_of_the_dashboard_returns_data_under_load(model_cache: Path, tmp_path: Path) -> None:
    topology = make_topology(cache_dir=model_cache)
    config = local_config(topology, tmp_path)
    with running_up(topology) as (up, _), prometheus(config, tmp_path) as server, load(topology):
        missing, deadline = queries(), time.monotonic() + WARM_SECONDS
        while missing and time.monotonic() < deadline:
            time.sleep(1)
            missing = [(panel, query) for panel, query in missing if not _has_data(server.values(query))]
        assert not missing, "no data: " + "\n".join(f"{panel}: {query}" for panel, query in missing)
        assert server.values('sum(up{job=~"pagewire-.*"})') == [3]
        assert server.values('sum(rate(pagewire_generation_tokens_total{role="router"}[15s])) > 0')
        for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
            for rule in group["rules"]:
                named = set(re.findall(r"\b(?:pagewire_\w+|up)\b(?=[{\[ )])", rule["expr"]))
                assert named and named <= server.names(), f"{rule['alert']} asks for {named - server.names()}"
                assert not server.values(rule["expr"]), f"{rule['alert']} fires while all is well"
        assert up.stdout
        line = next(line for line in up.stdout if " running, " in line)  # up's own, each ten seconds
        assert re.match(r"[1-9]\d* running, \d+ waiting, [\d.]+ prompt tokens/s, [\d.]+ tokens/s, KV use [\d.]+%", line)


def _has_data(values: list[float]) -> bool:
    return any(value == value for value in values)  # NaN is a quantile of nothing
