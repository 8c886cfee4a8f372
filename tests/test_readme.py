"""What the README says can be typed exists, and CI runs the README's own test command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import Cluster
from typer.main import get_command

from decode_service.config import ROLE as DECODE
from pagewire.cli import app
from prefill_service.config import ROLE as PREFILL
from router.config import parse as router_flags
from wire.options import parse as worker_flags

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def flags_of(command: str) -> set[str]:
    return {option for parameter in COMMANDS[command].params for option in parameter.opts} | {"--help"}


def python_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_every_make_target_that_it_names_is_there() -> None:
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", README))
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert {"demo", "serve", "test", "lint"} <= named <= targets


def test_ci_runs_the_test_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    assert "make test" in lines and "make lint" in lines


def test_every_command_and_flag_that_it_shows_is_there() -> None:
    for command, rest in re.findall(r"pagewire (up|generate|chat|ps|health|version)\b([^`\n]*)", README):
        assert set(re.findall(r"(--[a-z-]+)", rest)) <= flags_of(command), f"pagewire {command}{rest}"
    for command, rest in re.findall(r"pagewire bench ([a-z]+)\b([^`\n]*)", README):
        flags = {option for parameter in COMMANDS["bench"].commands[command].params for option in parameter.opts}
        assert set(re.findall(r"(--[a-z-]+)", rest)) <= flags, f"pagewire bench {command}{rest}"
    table = README.split("## Configuration")[1].split("## ")[0]
    documented = {
        flag for row in re.findall(r"^\| (`--.*?) \|", table, re.MULTILINE) for flag in re.findall(r"--[a-z-]+", row)
    }
    assert flags_of("up") - documented == {"--demo", "--help"}


def test_every_flag_of_a_process_that_it_shows_can_be_parsed() -> None:
    shown = re.findall(r"python -m (router|prefill_service|decode_service) (--.*)", README)
    assert {module for module, _ in shown} == {"router", "prefill_service", "decode_service"}
    for module, line in shown:
        flags = [part for part in line.split() if part != "token" and part != "--token-file"]
        if module == "router":
            assert router_flags(flags, {}).targets[0][1] == "127.0.0.2:50061"
        else:
            role = PREFILL if module == "prefill_service" else DECODE
            assert worker_flags(role, flags, {}).host in ("127.0.0.2", "127.0.0.3")


def test_every_folder_that_it_describes_is_there() -> None:
    table = README.split("| folder |")[1].split("\n\n")[0]
    folders = re.findall(r"`([a-z_]+/)`", table)
    assert folders and all((ROOT / folder).is_dir() for folder in folders)


@pytest.mark.parametrize("example", python_examples(), ids=["client", "llm", "async"])
def test_every_python_example_runs(
    example: str, cluster: Cluster, model_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a model that is small enough for a test."""
    code = example.replace("127.0.0.1:50051", cluster.address)
    tiny = f'"random:tiny", download_dir={str(model_cache)!r}, kv_cache_memory_bytes="4MiB"'
    code = code.replace('model="smollm2"', f"model={tiny}")
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out
