"""Load tools that users have, unmodified, against a real router and its workers: `make test-load` installs and runs.

guidellm and aiperf speak to the HTTP door and each live in an environment of their own; Locust and MLPerf LoadGen drive
the gRPC API by the files of benchmarks/. Each tool's own report says what it saw: all completed, none errored.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parent.parent
REQUESTS = 30
COMMIT = "0" * 40  # of the tokenizer's snapshot: any name of this form


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def installed(tool: str) -> Path:
    path = Path(sys.prefix, tool, "bin", tool)
    assert path.exists(), f"{tool} is not installed: `make test-load` does it"
    return path


def base_url(cluster: Cluster) -> str:
    return f"http://127.0.0.1:{cluster.topology.http_port}"


@pytest.fixture
def hub(model_cache: Path, cluster: Cluster, tmp_path: Path) -> Path:
    """A Hugging Face cache in which `pagewire/tiny` is the served model's tokenizer: no tool needs the network."""
    (model,) = (path for path in model_cache.iterdir() if path.is_dir())
    cached = tmp_path / "hf" / "hub" / "models--pagewire--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT, "utf-8")
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / COMMIT).symlink_to(model)
    return tmp_path / "hf"


def test_guidellm_completes_every_request(cluster: Cluster, hub: Path, tmp_path: Path) -> None:
    run(
        installed("guidellm"), "run",
        "--backend", f"kind=openai_http,target={base_url(cluster)}",
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", "kind=hf_auto,model=pagewire/tiny",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", f"kind=json,path={tmp_path / 'guidellm.json'}",
        "--disable-console-interactive",
        cwd=tmp_path, HF_HOME=str(hub), HF_HUB_OFFLINE="1", GUIDELLM__MAX_WORKER_PROCESSES="1",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "guidellm.json").read_text("utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert {request["output_metrics"]["text_tokens"] for request in benchmark["requests"]["successful"]} == {16}


def test_aiperf_completes_every_request(cluster: Cluster, hub: Path, tmp_path: Path) -> None:
    run(
        installed("aiperf"), "profile", "--model", "random:tiny", "--url", base_url(cluster),
        "--endpoint-type", "chat", "--streaming", "--request-count", str(REQUESTS), "--concurrency", "4",
        "--tokenizer", "pagewire/tiny", "--isl", "64", "--osl", "16", "--extra-inputs", "ignore_eos:true",
        "--use-server-token-count", "--artifact-dir", tmp_path / "aiperf", "--ui", "none", "--no-gpu-telemetry",
        "--workers-max", "1", "--record-processors", "1",
        cwd=tmp_path, HF_HOME=str(hub), HF_HUB_OFFLINE="1",
    )  # fmt: skip
    report = json.loads((tmp_path / "aiperf" / "profile_export_aiperf.json").read_text("utf-8"))
    assert report["request_count"]["avg"] == report["completed_request_count"]["avg"] == REQUESTS
    assert not report.get("error_request_count") and not report["error_summary"]
    assert (report["output_sequence_length"]["min"], report["output_sequence_length"]["max"]) == (16, 16)


def test_locust_users_stream_over_grpc_without_a_failure(cluster: Cluster, tmp_path: Path) -> None:
    run(
        Path(sys.executable).parent / "locust", "-f", ROOT / "benchmarks" / "locustfile.py", "--headless",
        "--host", cluster.address, "--users", "4", "--spawn-rate", "4", "--run-time", "4s", "--output-len", "8",
        "--csv", tmp_path / "locust",
        cwd=tmp_path,
    )  # fmt: skip
    with (tmp_path / "locust_stats.csv").open(encoding="utf-8") as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    assert int(rows["GenerateStream"]["Request Count"]) >= 8
    assert rows["Aggregated"]["Failure Count"] == "0"
    assert float(rows["GenerateStream"]["Average Content Size"]) == 8, "tokens of an answer"
    assert float(rows["TTFT"]["Average Response Time"]) < float(rows["GenerateStream"]["Average Response Time"])


@pytest.mark.parametrize("scenario", ["Server", "Offline"])
def test_mlperf_loadgen_sees_first_tokens_and_all_tokens(cluster: Cluster, scenario: str, tmp_path: Path) -> None:
    printed = run(
        sys.executable, "-m", "benchmarks.loadgen", "--address", cluster.address, "--scenario", scenario,
        "--target-qps", "10", "--num-samples", "20", "--min-duration", "2", "--input-len", "32", "--output-len", "8",
        "--ttft", "60000", "--tpot", "60000", "--output-dir", tmp_path,
        cwd=ROOT,
    )  # fmt: skip
    assert "No errors encountered during test." in printed
    found = summary(printed)
    assert found["Scenario"] == scenario
    if scenario == "Server":
        for name in ("Performance constraints", "Min duration", "Min queries"):  # VALID needs 459 queries
            assert found[f"{name} satisfied"] == "Yes"
        assert 0 < float(found["Mean First Token latency (ns)"]) < float(found["Mean latency (ns)"])
        assert float(found["Completed tokens per second"]) > 0
    else:
        assert float(found["Tokens per second"]) == pytest.approx(8 * float(found["Samples per second"]), rel=0.01)


def summary(text: str) -> dict[str, Any]:
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def test_a_run_is_drawn(cluster: Cluster, tmp_path: Path) -> None:
    run(
        sys.executable, "-m", "pagewire", "bench", "serve", "--address", cluster.address, "--num-prompts", "8",
        "--output-len", "8", "--plot", tmp_path / "run.png",
        cwd=ROOT,
    )  # fmt: skip
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"
