"""What a person sees of the `pagewire` command, against real processes on a tiny random model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import Cluster, make_topology
from emulated_gpu import EmulatedGpu

from pagewire.cli import doctor, plan
from pagewire.cli.deployment import Topology
from pagewire.cli.failure import CommandFailed
from pagewire.cli.processes import child_environment

PAGEWIRE = (sys.executable, "-m", "pagewire")
TLS = Path(__file__).parent / "tls"
UP_SECONDS = 90


def pagewire(
    *arguments: str, stdin: str | bytes = b"", seconds: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    given = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*PAGEWIRE, *arguments],
        input=given,
        capture_output=True,
        env={**child_environment(), **environment},
        timeout=seconds,
        check=False,
    )
    out, err = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
    assert "Traceback" not in err, err
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("pagewire: "), done.stderr
    return lines[0]


# ---- without a server ---------------------------------------------------------------------------------------------


def test_kernels_are_compiled_ahead_or_a_sentence_says_what_is_missing(model_cache: Path, tmp_path: Path) -> None:
    flags = ("--model", "random:tiny", "--model-cache-dir", str(model_cache), "--cache-dir", str(tmp_path / "kernels"))
    assert "--arch must be sm_80 or sm_90a" in one_sentence(pagewire("compile", *flags, "--arch", "sm_70"))
    lacking = one_sentence(pagewire("compile", *flags, "--arch", "sm_90a", PATH=str(tmp_path)))
    assert "install CUDA's nvcc" in lacking and "`pagewire compile`" in lacking
    assert "block size 17 is not supported" in one_sentence(pagewire("compile", *flags, "--block-size", "17"))
    (tmp_path / "file").write_text("")
    nowhere = pagewire("compile", "--model", "random:tiny", PAGEWIRE_CACHE_DIR=str(tmp_path / "file"))
    assert str(tmp_path / "file") in one_sentence(nowhere)


def processor_seconds(*argv: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *argv], capture_output=True, env=child_environment(), timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_little_more_processor_time_than_the_library_that_prints_it() -> None:
    """Side by side, the best of three: a machine that is slow is slow for both. Half a second on one that is not."""
    shown = pagewire("--help").stdout
    assert all(command in shown for command in ("up", "generate", "chat", "ps", "health", "version"))
    library = ("-c", "import typer, rich.console, rich.panel, rich.table, rich.markdown")
    pairs = [(processor_seconds("-m", "pagewire", "--help"), processor_seconds(*library)) for _ in range(3)]
    ours, bare = min(took for took, _ in pairs), min(took for _, took in pairs)
    assert ours < 3 * bare, f"{ours:.2f} s, and {bare:.2f} s for the library alone"


def test_help_loads_nothing_that_takes_long() -> None:
    heavy = ("asyncio", "grpc", "google.protobuf", "torch", "numpy", "pydantic", "fastapi", "router", "psutil")
    look = f"import sys, pagewire.cli; print(*sorted(sys.modules.keys() & set({heavy!r})))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, env=child_environment())
    assert done.stdout.split() == [], done.stderr


def test_a_dry_run_says_where_each_setting_comes_from_and_what_memory_it_takes(
    model_cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "pagewire.yaml"
    file.write_text("kv-memory: 1MiB\nkv_digest: off\nblock-size: 32\nmodel: smollm2\n")
    flags = ("up", "--dry-run", "--config", str(file), "--model", "random:tiny", "--cache-dir", str(model_cache))
    shown = pagewire(*flags, PAGEWIRE_BLOCK_SIZE="16", PAGEWIRE_DECODE="2").stdout
    for line in (
        r"--model +random:tiny  \(command line\)",
        r"--block-size +16  \(environment\)",
        rf"--kv-memory +1MiB  \({file}\)",
        rf"--kv-digest +off  \({file}\)",
        r"--port +50051  \(default\)",
        r"decode-2 +127.0.0.1:50072",
        r"KV pool +[\d.]+ .iB = [\d,]+ blocks x 16 = [\d,]+ tokens",
        r"together +3 workers x",
    ):
        assert re.search(line, shown), f"{line} is not in\n{shown}"
    planned = json.loads(pagewire(*flags, "--json").stdout)
    assert planned["memory"]["blocks"] * planned["memory"]["block"] <= 2**20
    file.write_text(f"decode: 2\ncache-dir: {model_cache}\napi-key: not for every eye\n")
    shown = pagewire("up", "--dry-run", "--model", "random:tiny", PAGEWIRE_CONFIG=str(file)).stdout
    assert "decode-2" in shown and "not for every eye" not in shown
    assert planned["configuration"]["--block-size"] == {"value": 32, "from": str(file)}


def test_a_dry_run_refuses_what_the_workers_would_refuse(model_cache: Path) -> None:
    flags = ("up", "--dry-run", "--model", "random:tiny", "--cache-dir", str(model_cache))
    said = pagewire(*flags, "--kv-memory", "1KiB").stderr.splitlines()[-1]
    assert said.startswith("pagewire: --kv-memory of 1024 bytes holds 0 KV blocks of ")
    said = pagewire(*flags, "--device", "cuda").stderr.splitlines()[-1]
    assert re.match(r"pagewire: --device cuda: torch .*; --device cpu and auto run on the CPU$", said)


def test_a_dry_run_plans_for_the_cpu_where_the_workers_could_not_use_the_card(
    model_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver has one, and this torch cannot use it."""
    monkeypatch.setattr(plan, "cuda_cards", lambda: [("a card", (9, 0), 2**37)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    asyncio.run(plan.dry_run(make_topology(cache_dir=model_cache), {"--device": (None, "left to the process")}, False))
    shown = capsys.readouterr().out
    assert re.search("float32 on the CPU: torch .* (finds no CUDA GPU|is built without CUDA)\n", shown), shown
    assert "KV pool   16.00 MiB" in shown or "KV pool   16.0 MiB" in shown, shown


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A usable one of 1 GiB, all of it free."""
    monkeypatch.setattr(plan, "cuda_cards", lambda: [("a card", (9, 0), 2**30)])
    for name, value in (
        ("is_available", True),
        ("get_device_capability", (9, 0)),
        ("mem_get_info", (2**30, 2**30)),
        ("memory_reserved", 0),
    ):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    monkeypatch.setattr("kvtransfer.startup_cuda.Gpu", EmulatedGpu)


def test_a_dry_run_plans_for_a_card_that_can_be_used(
    card: None, model_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {"--device": (None, "left to the process")}
    asyncio.run(plan.dry_run(make_topology(cache_dir=model_cache, kv_memory=None), sources, False))
    shown = capsys.readouterr().out
    assert "memory of each worker, bfloat16 on a CUDA card\n" in shown
    assert "KV pool   what the weights and a step leave, in blocks of" in shown and "card      1.00 GiB" in shown
    asyncio.run(plan.dry_run(make_topology(cache_dir=model_cache, kv_memory="64MiB"), sources, False))
    shown = capsys.readouterr().out
    assert re.search(r"KV pool   64.0 MiB = 4,096 blocks x 16 = 65,536 tokens\n", shown), shown
    assert "of 1.00 GiB" in shown, "the card's memory, not the machine's"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"kv_memory": "1GiB"}, "weights take .* bytes in bfloat16 and --kv-memory 1073741824, .* GPU's 1073741824"),
        ({"kv_memory": "1KiB"}, "--kv-memory is 1024 bytes; 2 KV blocks, the least, take"),
        ({"max_model_len": 2**20}, "--max-model-len is 1048576 and the model takes at most"),
        ({"gpu_memory_utilization": 0.001}, "this worker may use 536870 of the GPU's 1073741824"),
    ],
)
def test_a_dry_run_for_a_card_refuses_what_its_workers_would_refuse(
    card: None, model_cache: Path, flags: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CommandFailed, match=sentence):
        asyncio.run(plan.dry_run(make_topology(cache_dir=model_cache, **flags), {}, False))


def test_each_process_can_be_started_through_the_one_command() -> None:
    for role in ("router", "prefill", "decode"):
        assert f"usage: pagewire {role} " in pagewire(role, "--help").stdout
        refused = pagewire(role, "--port", "70000", "--model", "random:tiny")
        assert refused.returncode == 2 and "[0, 65535], got '70000'" in refused.stderr


def test_the_doctor_names_a_mend_for_each_fault(tmp_path: Path, free_port: int) -> None:
    looked = pagewire("doctor", "--address", f"127.0.0.1:{free_port}", "--cache-dir", str(tmp_path), "--json")
    found = json.loads(looked.stdout)
    assert {"python", "packages", "protobuf", "memory", "memfd", "gpu", "nvcc", "models"} <= {
        each["check"] for each in found
    }
    assert all(each["mend"] or each["state"] == "ok" for each in found), found
    assert looked.returncode == int(any(each["state"] == "fault" for each in found))
    lines = pagewire("doctor", "--address", f"127.0.0.1:{free_port}", "--cache-dir", str(tmp_path)).stdout
    assert re.search(rf"note +router +nothing answers at 127.0.0.1:{free_port}", lines)


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", pagewire("version").stdout)


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"], ["ps"], ["health"]])
def test_nobody_at_the_address_is_one_sentence_that_names_it(command: list[str], free_port: int) -> None:
    done = pagewire(*command, "--address", f"127.0.0.1:{free_port}", stdin="hello\n")
    assert done.returncode == 1
    assert f"127.0.0.1:{free_port}" in one_sentence(done)


def test_an_empty_prompt_is_refused() -> None:
    done = pagewire("generate", stdin=" \n")
    assert done.returncode == 2
    assert "the prompt is empty" in one_sentence(done)


def test_input_that_is_not_utf8_is_refused_with_its_place() -> None:
    done = pagewire("generate", stdin=b"caf\xe9")
    assert done.returncode == 2
    assert "not UTF-8" in one_sentence(done) and "byte 3" in done.stderr


def test_a_parameter_out_of_range_names_the_flag() -> None:
    done = pagewire("generate", "hello", "--temperature", "11")
    assert done.returncode == 2
    assert "--temperature" in done.stderr


# ---- against a running cluster ------------------------------------------------------------------------------------


def test_generate_writes_only_the_answer_to_stdout(cluster: Cluster) -> None:
    flags = ("--address", cluster.address, "--max-tokens", "8")
    once = pagewire("generate", "hello", *flags)
    assert once.returncode == 0 and once.stdout and not once.stderr
    assert pagewire("generate", *flags, stdin="hello").stdout == once.stdout, "standard input is a prompt too"
    stats = pagewire("generate", "hello", "--stats", *flags)
    assert stats.stdout == once.stdout and "8 tokens, ended by length" in stats.stderr


def test_chat_remembers_resets_and_leaves(cluster: Cluster) -> None:
    flags = ("--address", cluster.address, "--max-tokens", "4")
    again = pagewire("chat", *flags, stdin="hello\n/reset\nhello\n/exit\nnever sent\n")
    first, second = again.stdout.encode().split(b"\n")[:2], again.stdout
    assert again.returncode == 0 and first and second.count("\n") >= 2
    half = again.stdout[: len(again.stdout) // 2]
    assert again.stdout == half + half, "after /reset the same question has the same answer"
    grown = pagewire("chat", *flags, stdin="hello\nhello\n")
    assert grown.stdout.startswith(half) and grown.stdout != again.stdout, "the second turn saw the first"


def test_chat_survives_a_turn_that_is_refused(cluster: Cluster) -> None:
    flags = ("--address", cluster.address, "--max-tokens", "4")
    done = pagewire("chat", *flags, stdin="x" * 200_000 + "\nhello\n")
    assert done.returncode == 0
    assert "tokens" in one_sentence(done)
    assert done.stdout == pagewire("chat", *flags, stdin="hello\n").stdout, "the refused turn is forgotten"


def test_ps_lists_each_worker_with_its_blocks(cluster: Cluster) -> None:
    lines = pagewire("ps", "--address", cluster.address).stdout.splitlines()
    roles = [line.split()[:3] for line in lines[2:4]]
    addresses = [cluster.programs[name].address for name in ("prefill-1", "decode-1")]
    assert roles == [["prefill", addresses[0], "accepting"], ["decode", addresses[1], "accepting"]]
    assert f"{addresses[1]} KV from {addresses[0]} by memfd, " in lines[4], "and how blocks come, with its speed"


def test_the_doctor_sees_that_torch_cannot_use_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_cards", lambda: [("a card", (9, 0), 2**37)])
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.13.0+cpu")
    (found,) = doctor._gpu()
    assert found.state == "fault" and "torch 2.13.0+cpu is built without CUDA" in found.says and "PyPI" in found.mend


def test_the_doctor_faults_a_machine_without_the_card_that_its_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "cuda_cards", lambda: "no NVIDIA driver: workers run on the CPU")
    assert [each.state for each in doctor._gpu()] == ["ok"]
    monkeypatch.setenv("PAGEWIRE_DEVICE", "cuda")
    (found,) = doctor._gpu()
    assert found.state == "fault" and found.says == "no NVIDIA driver, and PAGEWIRE_DEVICE is cuda" and found.mend


def test_ps_and_doctor_print_json_of_the_same_workers(cluster: Cluster) -> None:
    listed = json.loads(pagewire("ps", "--json", PAGEWIRE_ADDRESS=cluster.address).stdout)
    assert {each["role"] for each in listed["workers"]} == {"prefill", "decode"}
    looked = pagewire("doctor", "--address", cluster.address, "--json")
    found = {each["check"]: each for each in json.loads(looked.stdout)}
    for worker in listed["workers"]:
        assert found[worker["role"]]["state"] == "ok" and worker["address"] in found[worker["role"]]["says"]


def test_health_tells_ready_from_alive(cluster: Cluster) -> None:
    assert pagewire("health", "--address", cluster.address).stdout == "ready\n"
    worker = cluster.programs["decode-1"].address
    done = pagewire("health", "--address", worker)
    assert done.returncode == 1
    assert "is alive, but pagewire.v1.GenerationService is not ready" in one_sentence(done)


def test_a_client_at_a_workers_port_is_told_so(cluster: Cluster) -> None:
    done = pagewire("generate", "hello", "--address", cluster.programs["decode-1"].address)
    assert done.returncode == 1
    assert "decode worker" in one_sentence(done)


# ---- up -----------------------------------------------------------------------------------------------------------


def up_flags(topology: Topology) -> list[str]:
    return [
        *("--model", topology.model, "--kv-memory", "16MiB", "--port", str(topology.port)),
        *("--prefill-port", str(topology.prefill_port), "--decode-port", str(topology.decode_port)),
        *("--http-port", str(topology.http_port), "--cache-dir", str(topology.cache_dir)),
        *("--prefill-http-port", str(topology.prefill_http_port)),
        *("--decode-http-port", str(topology.decode_http_port)),
    ]


@contextmanager
def running_up(topology: Topology, *flags: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """`pagewire up` that has printed its block, and the three processes that it started."""
    process = subprocess.Popen(
        [*PAGEWIRE, "up", *up_flags(topology), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**child_environment(), "TMPDIR": str(topology.cache_dir)},  # for the logs, which a kill leaves behind
    )
    assert process.stdout
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "Ctrl-C stops everything" in line:
                break
        assert process.poll() is None, "".join(seen)
        yield process, psutil.Process(process.pid).children()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def all_gone(processes: list[psutil.Process], seconds: float = 10.0) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def test_the_demo_answers_reports_and_leaves_nothing(model_cache: Path) -> None:
    topology = make_topology(cache_dir=model_cache)
    done = pagewire("up", *up_flags(topology), "--demo", "hello", seconds=UP_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    for phase in ("model", "router", "prefill-1", "decode-1"):
        assert re.search(rf"^{phase} .*\(\d+\.\d s\)$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"time to first token +\d+\.\d+ s", done.stdout)
    assert re.search(r"KV moved +[1-9]\d* blocks, [1-9][\d,]* bytes, by memfd", done.stdout), done.stdout
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", topology.port)) != 0, "the router is gone"


@pytest.mark.usefixtures("not_installed")
def test_a_source_tree_that_is_not_installed_serves(model_cache: Path) -> None:
    with running_up(make_topology(cache_dir=model_cache)) as (_, children):
        assert len(children) == 3
    assert all_gone(children)
    (found,) = (each for each in json.loads(pagewire("doctor", "--json").stdout) if each["check"] == "packages")
    assert found["state"] == "note" and "source tree" in found["says"] and found["mend"]


def test_sigterm_drains_and_leaves_nothing(model_cache: Path) -> None:
    with running_up(make_topology(cache_dir=model_cache)) as (up, children):
        assert len(children) == 3
        up.send_signal(signal.SIGTERM)
        assert up.wait(timeout=30) == 0
        assert all_gone(children, seconds=0.5)


def test_nothing_survives_a_kill_of_up(model_cache: Path) -> None:
    with running_up(make_topology(cache_dir=model_cache)) as (up, children):
        up.kill()
        assert all_gone(children)


def test_a_worker_that_dies_is_reported_and_ends_a_deployment_that_needs_it(model_cache: Path) -> None:
    with running_up(make_topology(cache_dir=model_cache)) as (up, children):
        victim = next(child for child in children if "decode_service" in child.cmdline())
        victim.kill()
        assert up.stdout
        said = up.stdout.read()
        assert up.wait(timeout=30) == 1
        assert f"decode-1 (pid {victim.pid}) was killed by SIGKILL; its last lines" in said
        assert said.endswith("\nstopping: requests have 30 s to finish\npagewire: stopped, because decode-1 ended\n")
        assert all_gone(children, seconds=0.5)


def test_a_router_for_other_machines_runs_under_mtls_and_a_token(model_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    tls = ("--tls-cert", str(TLS / "host.pem"), "--tls-key", str(TLS / "host.key"), "--tls-ca", str(TLS / "ca.pem"))
    protected = (*tls, "--token-file", str(tmp_path / "token"))
    topology = make_topology(cache_dir=model_cache)
    with running_up(topology, "--host", "0.0.0.0", *protected) as (_, children):
        assert len(children) == 3
        address = ("--address", topology.address)
        answer = pagewire("generate", "hello", "--max-tokens", "4", *address, *protected)
        assert answer.returncode == 0 and answer.stdout, answer.stderr
        assert pagewire("health", *address, *tls).stdout == "ready\n", "probes need no token"
        assert "speaks TLS" in one_sentence(pagewire("ps", *address))
        assert "a valid deployment token is required" in one_sentence(pagewire("ps", *address, *tls))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines"),
        (["--token-file", "/nowhere"], "--token-file /nowhere cannot be read: No such file"),
        (["--tls-cert", str(TLS / "host.pem")], "missing: --tls-key, --tls-ca"),
    ],
)
def test_an_address_that_nothing_protects_stops_up_before_anything_starts(flags: list[str], words: str) -> None:
    done = pagewire("up", "--model", "random:tiny", *flags)
    assert done.returncode == 2 and words in one_sentence(done)
    assert not done.stdout, "nothing was begun"


def test_a_wrong_size_is_the_workers_own_sentence(model_cache: Path, tmp_path: Path) -> None:
    """A sentence alone: no log lines, and no folder of logs is left behind."""
    topology = make_topology(cache_dir=model_cache)
    done = pagewire("up", *up_flags(topology), "--max-model-len", "100000", TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert re.search(
        r"(prefill|decode)-1: --max-model-len is 100000 and the model takes at most 8192$", one_sentence(done)
    )
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_is_one_sentence_that_lists_what_is_known(model_cache: Path) -> None:
    topology = make_topology(cache_dir=model_cache, model="no-such-model")
    done = pagewire("up", *up_flags(topology))
    assert done.returncode == 1
    assert "no-such-model" in one_sentence(done) and "smollm2" in done.stderr


def test_a_taken_port_stops_up_before_anything_starts(
    model_cache: Path, free_ports: Callable[[int], list[int]]
) -> None:
    topology = make_topology(cache_dir=model_cache)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", topology.prefill_port))
        holder.listen()
        done = pagewire("up", *up_flags(topology))
    assert done.returncode == 1
    sentence = one_sentence(done)
    assert f"port {topology.prefill_port}" in sentence and f"pid {os.getpid()}" in sentence
