"""Whatever /openapi.json allows, and much that it forbids, made up by schemathesis and sent to a real router.

`make test-http-schema` installs it and runs this. No answer may be a 5xx, and each is of the status, the content and
the body that the schema documents.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from cluster import Cluster, make_topology

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = "60"  # of each of the ten operations, and of each kind of data


@pytest.mark.timeout(240)
def test_made_up_requests_get_the_answers_that_the_schema_documents(tmp_path: Path, model_cache: Path) -> None:
    cluster = Cluster(make_topology(cache_dir=model_cache, max_model_len=64), tmp_path)  # or answers would be long
    argv = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{cluster.topology.url}/openapi.json"]
    argv += ["--checks", CHECKS, "--max-examples", EXAMPLES, "--seed", "1", "--generation-database", "none"]
    argv += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "30", "--no-color"]
    try:
        cluster.start()
        cluster.wait_ready()
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
        assert cluster.tracebacks("router") == []
        ended = httpx.get(f"{cluster.topology.url}/metrics").text.splitlines()
        served = sum(float(line.split()[-1]) for line in ended if line.startswith("pagewire_requests_finished_total"))
        assert served > 20, "almost nothing that was made up was a request"
        print(done.stdout[-2500:])
    finally:
        cluster.kill_all()
