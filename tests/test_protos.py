"""The wire's own rules: buf's lint, code that follows from the .proto files, and the public API's completeness."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protos import generation_pb2 as gpb
from protos import worker_pb2 as wpb

ROOT = Path(__file__).parent.parent


def test_buf_lint_passes() -> None:
    buf = Path(sys.executable).with_name("buf")
    done = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_code_is_that_of_the_proto_files(tmp_path: Path) -> None:
    sources = sorted(f"protos/{path.name}" for path in (ROOT / "protos").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources], cwd=ROOT, check=True)
    stale = [
        path.name
        for path in sorted((tmp_path / "protos").iterdir())
        if path.read_bytes() != (ROOT / "protos" / path.name).read_bytes()
    ]
    assert not stale, f"run `make protos`: {stale}"


def test_generated_code_is_never_committed() -> None:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "ls-files", "protos"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not [name for name in tracked.split() if "_pb2" in name]


def test_the_public_service_is_complete() -> None:
    methods = gpb.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name
    assert set(methods) == {"Generate", "GenerateStream", "Tokenize", "Detokenize", "ListModels", "GetServerInfo"}


def test_absent_numbers_of_a_request_can_be_told_from_zero() -> None:
    for message in (gpb.SamplingParams, gpb.StoppingParams, gpb.OutputOptions):
        for field in message.DESCRIPTOR.fields:
            plain = not field.is_repeated and field.type not in (field.TYPE_BOOL, field.TYPE_MESSAGE)
            assert not plain or field.has_presence, f"{message.DESCRIPTOR.name}.{field.name} needs `optional`"


def test_one_step_is_one_message() -> None:
    fields = wpb.StepBatch.DESCRIPTOR.fields_by_name
    assert all(fields[name].is_repeated for name in ("requests", "attempts", "placements", "indices", "token_ids"))
