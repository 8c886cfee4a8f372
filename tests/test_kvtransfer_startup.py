"""How large an engine becomes, and what a user is told when it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import ModelConfig, RopeConfig
from engine.messages import KvLayout
from kvtransfer.probe import spare_blocks
from kvtransfer.startup import assemble, engine_config
from prefill_service.config import ROLE
from wire.options import parse
from wire.worker import CannotStart

MODEL = ModelConfig("LlamaForCausalLM", 320, 128, 384, 2, 4, 2, 64, 1e-5, 8192, RopeConfig())
LAYOUT = KvLayout(b"m", "float32", 16, 2, 2, 64, 32768, "n")


def test_the_pool_is_what_the_memory_holds_and_a_request_may_be_as_long_as_the_model_takes() -> None:
    config = engine_config(parse(ROLE, ["--model", "m", "--kv-memory", "1MiB"], {}), MODEL, LAYOUT)
    assert (config.num_blocks, config.max_model_len, config.block_size) == (32, 8192, 16)
    assert config.max_num_batched_tokens == ROLE.max_num_batched_tokens


def test_however_large_a_block_is_a_worker_of_both_kinds_can_probe_and_be_probed() -> None:
    assert spare_blocks(4 << 20) == 4 and spare_blocks(100 << 20) == 2


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--kv-memory", "1KiB"],
            "--kv-memory of 1024 bytes holds 0 KV blocks of 32768 bytes; at least 65536 are needed",
        ),
        (["--kv-memory", "4096TiB"], f"--kv-memory is {4096 * 2**40} bytes and this machine has"),
        (["--max-model-len", "100000"], "--max-model-len is 100000 and the model takes at most 8192"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_numbers(argv: list[str], sentence: str) -> None:
    with pytest.raises(CannotStart) as caught:
        engine_config(parse(ROLE, ["--model", "m", *argv], {}), MODEL, LAYOUT)
    assert str(caught.value).startswith(sentence)


def test_weights_that_this_machine_cannot_hold_are_refused_before_they_are_read() -> None:
    huge = replace(MODEL, num_layers=10**7)
    with pytest.raises(CannotStart, match=r"the weights take \d+ bytes in float32 and --kv-memory 1048576, and this"):
        engine_config(parse(ROLE, ["--model", "m", "--kv-memory", "1MiB"], {}), huge, LAYOUT)


def test_an_unknown_model_is_refused_with_what_is_known() -> None:
    lines: list[str] = []
    with pytest.raises(CannotStart, match="no-such-model.*smollm2"):
        assemble(parse(ROLE, ["--model", "no-such-model"], {}), lines.append)
    assert lines == ["finding the model"]


@pytest.mark.parametrize(("assembled", "further"), [("assemble", 0), ("assemble_worker", 5)])
def test_a_worker_on_the_cpu_gives_way_and_a_program_with_an_engine_of_its_own_does_not(
    assembled: str, further: int, model_cache: Path
) -> None:
    """Each leads its session, as a service of somebody's may."""
    program = f"""
import os
from kvtransfer.startup import {assembled}
from prefill_service.config import ROLE
from wire.options import parse
argv = ["--model", "random:tiny", "--device", "cpu", "--kv-memory", "1MiB", "--cache-dir", {str(model_cache)!r}]
{assembled}(parse(ROLE, argv, {{}}), lambda line: None)
threads = map(int, os.listdir("/proc/self/task"))
print(*{{os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}})
"""
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, start_new_session=True, check=True
    )
    assert child.stdout.split() == [str(min(19, os.getpriority(os.PRIO_PROCESS, 0) + further))]
