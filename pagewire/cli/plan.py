"""`pagewire up --dry-run`: what would be started, where each setting comes from, and what memory it takes.

Starts nothing; finds the model, and converts it if that was never done. The numbers come from the functions that the
workers themselves use, so that what is refused here is what they would refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console

from pagewire.cli.deployment import MODULES, Topology, check_ports, check_security, programs
from pagewire.cli.doctor import cuda_cards
from pagewire.cli.failure import CommandFailed
from pagewire.cli.phases import Phases
from pagewire.cli.processes import child_environment

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from engine.messages import KvLayout
    from wire.options import WorkerOptions


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one worker, in bytes. `device`: what the workers would run on; `why` that is the CPU, if it was left open."""

    device: str
    why: str
    dtype: str
    parameters: int
    weights: int
    block: int
    kv_pool: int | None  # None: what is left on the card
    blocks: int | None
    block_size: int
    max_model_len: int
    workers: int
    total: int  # of the machine, or of the card

    @property
    def tokens(self) -> int:
        return (self.blocks or 0) * self.block_size

    def lines(self) -> list[str]:
        whole = f"{self.parameters:,} parameters x {self.weights // self.parameters} bytes = {size(self.weights)}"
        if self.kv_pool is None or self.blocks is None:
            pool = f"what the weights and a step leave, in blocks of {size(self.block)} for {self.block_size} tokens"
            return [f"weights   {whole}", f"KV pool   {pool}", f"card      {size(self.total)}"]
        at_once = self.tokens / self.max_model_len
        each = self.weights + self.kv_pool
        return [
            f"weights   {whole}",
            f"KV pool   {size(self.kv_pool)} = {self.blocks:,} blocks x {self.block_size} = {self.tokens:,} tokens",
            f"requests  {at_once:.1f} of {self.max_model_len:,} tokens at once",
            f"together  {self.workers} workers x {size(each)} = {size(self.workers * each)} of {size(self.total)}",
        ]


async def dry_run(topology: Topology, sources: Mapping[str, tuple[object, str]], as_json: bool) -> None:
    """`sources`: value and origin of each flag, by its name. Raises CommandFailed where `up` would."""
    from pagewire.cli.up import prepare_model

    check_security(topology)
    check_ports(topology)
    with Phases(Console(stderr=True, highlight=False)) as phases:
        folder = await prepare_model(topology, phases)
    memory = memory_plan(topology, folder)
    if as_json:
        started = [{"name": each.name, "address": each.address, "command": [*each.argv]} for each in programs(topology)]
        flags = {name: {"value": _plain(value), "from": origin} for name, (value, origin) in sources.items()}
        print(json.dumps({"processes": started, "configuration": flags, "memory": asdict(memory)}, indent=2))
        return
    width = max(map(len, sources))
    print("\n".join([
        "would start",
        *(f"  {each.name:<10} {each.address}" for each in programs(topology)),
        f"  HTTP       {topology.url}",
        "configuration",
        *(f"  {name:<{width}}  {_shown(value)}  ({origin})" for name, (value, origin) in sources.items()),
        f"memory of each worker, {memory.dtype} on {memory.device}" + (f": {memory.why}" if memory.why else ""),
        *(f"  {line}" for line in memory.lines()),
    ]))  # fmt: skip


def memory_plan(topology: Topology, folder: Path) -> Memory:
    """What each worker that decodes would take. Raises CommandFailed, with the worker's own sentence."""
    from engine.config import ModelConfig, ModelError
    from engine.messages import KvLayout
    from kvtransfer.startup import BYTES, engine_config, longest_request
    from pagewire.cli.deployment import worker_flags
    from wire.flags import BadOption
    from wire.options import parse
    from wire.worker import CannotStart

    role = import_module(f"{MODULES['shared' if topology.shared else 'decode']}.config").ROLE
    try:
        options = parse(role, worker_flags(topology), child_environment())
        model = ModelConfig.from_dir(folder)
        card, why = _card(options, model)
        dtype = options.dtype if options.dtype != "auto" else "float32" if card is None else "bfloat16"
        block = model.kv_block_values(options.block_size) * BYTES[dtype]
        shape = (model.num_layers, model.num_kv_heads, model.head_dim, block)
        layout = KvLayout(b"", dtype, options.block_size, *shape, "")
        longest = longest_request(options, model)
        blocks = engine_config(options, model, layout).num_blocks if card is None else _on_card(options, model, layout)
    except (BadOption, CannotStart, ModelError) as error:
        raise CommandFailed(str(error)) from None
    return Memory(
        device="the CPU" if card is None else "a CUDA card",
        why=why,
        dtype=dtype,
        parameters=model.num_parameters,
        weights=model.num_parameters * BYTES[dtype],
        block=block,
        kv_pool=None if blocks is None else blocks * block,
        blocks=blocks,
        block_size=options.block_size,
        max_model_len=longest,
        workers=len(list(topology.workers())),
        total=card or psutil.virtual_memory().total,
    )


def _card(options: WorkerOptions, model: ModelConfig) -> tuple[int | None, str]:
    """Memory of the card that the workers would take, or why they take none. Loads torch only if the driver has one."""
    from kvtransfer.startup import chosen_card

    cards = cuda_cards() if options.device != "cpu" else ""
    if isinstance(cards, str) and options.device != "cuda":
        return None, cards.partition(":")[0].partition(";")[0]
    card = chosen_card(options, model)
    if isinstance(card, str) or isinstance(cards, str):
        return None, str(card)
    return cards[0][2], ""


def _on_card(options: WorkerOptions, model: ModelConfig, layout: KvLayout) -> int | None:
    """The KV blocks that --kv-memory asks for; None: what a step leaves, which only a worker can measure.

    Raises CannotStart.
    """
    import torch

    from kvtransfer.gpu_memory import Step, check_weights, pool_blocks
    from kvtransfer.startup import BYTES
    from wire.worker import CannotStart

    check_weights(options, model, layout.dtype)
    if options.kv_memory is None:
        return None
    weights = model.num_parameters * BYTES[layout.dtype]
    free, total = torch.cuda.mem_get_info()
    if weights + options.kv_memory > free:
        raise CannotStart(
            f"the weights take {weights} bytes in {layout.dtype} and --kv-memory {options.kv_memory}, "
            f"and of the GPU's {total} bytes {free} are free: --kv-memory must be less than {free - weights}"
        )
    return pool_blocks(options, layout, Step(1, 0))


def size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
