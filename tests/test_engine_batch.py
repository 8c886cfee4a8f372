"""A batch is a plain value that the schedulers may build without torch."""

from __future__ import annotations

import subprocess
import sys

from engine.batch import Batch, Row


def test_a_batch_counts_the_new_tokens_of_chunks_and_decode_rows() -> None:
    assert Batch().num_tokens == 0
    assert Batch([Row(0, [1, 2, 3], 0, [0]), Row(1, [4], 9, [1])]).num_tokens == 4


def test_two_batches_share_no_list() -> None:
    Batch().rows.append(Row(0, [1], 0, [0]))
    assert Batch().rows == []


def test_batch_config_fake_runner_and_device_thread_load_no_torch() -> None:
    names = "engine.batch, engine.config, engine.device_thread, engine.fake_runner"
    code = f"import sys, {names}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
