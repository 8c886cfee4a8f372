"""`pagewire up --demo`: one streamed answer, then what it took: time, speed, and the KV that changed hands."""

from __future__ import annotations

import asyncio
import sys
import time

from rich.console import Console

from engine.types import SamplingParams
from pagewire.answers import ServerInfo
from pagewire.cli.status import INFO_TIMEOUT, transport
from pagewire.client import AsyncClient
from wire.security import Security

MAX_TOKENS = 256
REPORT_SECONDS = 3.0  # workers report their counts about once a second


async def answer_and_report(address: str, security: Security, prompt: str, console: Console) -> None:
    async with AsyncClient(address, security) as client:
        before = await client.server_info(timeout=INFO_TIMEOUT)
        console.print(f"\n> {prompt}", markup=False, soft_wrap=True)
        began = time.monotonic()
        first = last = began
        tokens = 0
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        async with client.stream([{"role": "user", "content": prompt}], sampling) as stream:
            async for delta in stream:
                last = time.monotonic()
                first = last if tokens == 0 else first
                tokens += len(delta.token_ids)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        blocks, size, by = await _moved(client, before)
    speed = f"{(tokens - 1) / (last - first):.1f} tokens/s" if last > first else "one token"
    lines = (
        "",
        "",
        f"  time to first token   {first - began:.3f} s",
        f"  speed                 {speed} ({stream.usage.prompt_tokens} prompt tokens, {tokens} tokens)",
        f"  KV moved              {blocks} blocks, {size:,} bytes, by {by}",
    )
    console.print("\n".join(lines), markup=False, soft_wrap=True)


async def _moved(client: AsyncClient, before: ServerInfo) -> tuple[int, int, str]:
    """Blocks and bytes that decode workers copied in since `before`, and the transport."""
    known = {worker.address: worker.pulled_blocks for worker in before.workers}
    give_up = time.monotonic() + REPORT_SECONDS
    while True:
        info = await client.server_info(timeout=INFO_TIMEOUT)
        moved = [(worker, worker.pulled_blocks - known.get(worker.address, 0)) for worker in info.workers]
        blocks = sum(count for _, count in moved)
        if blocks or time.monotonic() > give_up:
            return blocks, sum(count * worker.block_bytes for worker, count in moved), transport(info)
        await asyncio.sleep(0.1)
