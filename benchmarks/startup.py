"""How long from exec to useful: `python -m benchmarks.startup --model smollm2`.

Starts the router (until its health service answers) and each kind of worker (until it is ready), one at a time, on
free ports, several times after one warm-up, and prints the medians beside what each must reach.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LIMITS = {"router alive": 1.0, "prefill ready": 8.0, "decode ready": 8.0}
PROGRAMS = {
    "router alive": ("router", ""),
    "prefill ready": ("prefill_service", "pagewire.v1.PrefillService"),
    "decode ready": ("decode_service", "pagewire.v1.DecodeService"),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def seconds_until(what: str, model: str, threads: int) -> float:
    module, service = PROGRAMS[what]
    port = free_port()
    ports = ("--port", str(port), "--http-port", "0")
    argv = [sys.executable, "-m", module, *ports, "--model", model, "--exit-with-parent"]
    argv += (
        ["--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1"] if module == "router" else ["--threads", str(threads)]
    )
    started = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_reconnect_backoff_ms", 50)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                if process.poll() is not None:
                    raise SystemExit(f"{module} ended with status {process.returncode} before it was ready")
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1, wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return time.monotonic() - started
                except grpc.RpcError:
                    pass
                time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for what, limit in LIMITS.items():
        seconds = [seconds_until(what, arguments.model, arguments.threads) for _ in range(arguments.runs + 1)][1:]
        median = statistics.median(seconds)
        results[what] = {"median_s": median, "min_s": min(seconds), "max_s": max(seconds), "limit_s": limit}
        verdict = "ok" if median <= limit else "MISSED"
        spread = f"min {min(seconds):.2f}, max {max(seconds):.2f}"
        print(f"{what:14} {median:6.2f} s ({spread}), at most {limit:g} s: {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": arguments.model, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
