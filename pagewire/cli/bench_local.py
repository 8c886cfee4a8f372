"""`pagewire bench kernels`, `kv` and `offline`: what is measured in this process, without a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.cli.failure import CommandFailed

if TYPE_CHECKING:
    from benchmarks.serve.settings import Settings

# The part's name and its module of benchmarks/, each with the parts that it knows itself.
KERNELS = {
    "attention": "kernels",
    "products": "kernels_small",
    "layers": "kernels_small",
    "sampling": "kernels_small",
    "small": "kernels_small",
}


def kernels(parts: Sequence[str], folder: Path | None) -> None:
    """Runs the parts, or all. With a folder, each module's figures are kept there as JSON. Needs a CUDA card."""
    if unknown := [part for part in parts if part not in KERNELS]:
        raise CommandFailed(f"there is no part {unknown[0]!r}: it is one of {', '.join(KERNELS)}", exit_code=2)
    import torch

    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds none here"
        raise CommandFailed(f"the kernels run on a CUDA card, and {built}; `pagewire bench offline` runs on the CPU")
    from importlib import import_module

    wanted = parts or list(KERNELS)
    for module in dict.fromkeys(KERNELS[part] for part in wanted):
        mine = [part for part in wanted if KERNELS[part] == module]
        argv = mine if module == "kernels" else ["--only", *mine]
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            argv += ["--json", str(folder / f"{module}.json")]
        import_module(f"benchmarks.{module}").main(argv)


def kv(flags: Sequence[str], paths: Sequence[str], folder: Path | None) -> None:
    """The paths of the CPU's memory, and those of cards where there is one."""
    known = ("memfd", "nixl", "grpc", "cuda_ipc")
    if unknown := [path for path in paths if path not in known]:
        raise CommandFailed(f"there is no path {unknown[0]!r}: it is one of {', '.join(known)}", exit_code=2)
    import torch

    from benchmarks import transfer

    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    if on_cpu := [path for path in paths or known if path != "cuda_ipc"]:
        chosen = [part for path in on_cpu for part in ("--path", path)]
        transfer.main([*flags, *chosen, *([] if folder is None else ["--json", str(folder / "kv-cpu.json")])])
    if "cuda_ipc" in (paths or known):
        if not torch.cuda.is_available():
            print("cuda_ipc           not here: torch finds no CUDA card")
            return
        from benchmarks import transfer_gpu

        transfer_gpu.main([] if folder is None else ["--json", str(folder / "kv-cuda.json")])


def offline(settings: Settings, output_json: Path | None, engine: dict[str, Any]) -> None:
    from benchmarks.offline import measure

    given = {name: value for name, value in engine.items() if value is not None}
    found = measure(settings, progress=sys.stderr.isatty(), **given)
    print(found)
    if output_json is not None:
        try:
            output_json.write_text(json.dumps(found.as_json(), indent=1) + "\n", "utf-8")
        except OSError as error:
            raise CommandFailed(f"--output-json {output_json}: {error.strerror}") from None
