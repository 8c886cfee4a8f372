"""The tokenizer files of a GGUF: transformers writes them in a child process, and we correct what it gets wrong.

tokenizer.json, tokenizer_config.json and chat_template.jinja. The child is ended with its TokenizerChild, whatever
happens. Corrected (transformers 5.17): the end token's name; the splitting of text before BPE, which GGUF gives by
name (`tokenizer.ggml.pre`) and transformers takes for GPT-2's; and a missing beginning-of-text token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.config import ModelError
from engine.loader.gguf_config import Metadata

_SCRIPT = """
import sys
from transformers import AutoTokenizer
folder, file, target = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)
"""

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITTERS: dict[str, Any] = {
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]},
    "llama-bpe": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": _LLAMA3_WORDS}, "behavior": "Isolated", "invert": False},
            {**_BYTE_LEVEL, "use_regex": False},
        ],
    },
}


class TokenizerChild:
    """Starts transformers at once; `finish` waits for it, corrects its files and moves them to `folder`."""

    def __init__(self, file: Path, folder: Path) -> None:
        self._file, self._folder = file, folder
        self._output = tempfile.TemporaryDirectory(dir=folder)
        command = [sys.executable, "-P", "-c", _SCRIPT, str(file.parent), file.name, self._output.name]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._errors = Path(self._output.name) / "errors"
        with self._errors.open("wb") as errors:
            self._child = subprocess.Popen(
                command, env=offline, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
            )

    def __enter__(self) -> TokenizerChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        self._output.cleanup()

    def finish(self, metadata: Metadata) -> None:
        if code := self._child.wait():
            said = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = said[-1] if said else f"exit code {code}"
            raise ModelError(f"transformers cannot read the tokenizer of {self._file.name}: {reason}")
        self._errors.unlink()
        written = Path(self._output.name)
        _edit(written / "tokenizer.json", lambda tokenizer: _correct_tokenizer(tokenizer, metadata))
        names = _token_names(json.loads((written / "tokenizer.json").read_text(encoding="utf-8")))
        _edit(written / "tokenizer_config.json", lambda config: _correct_config(config, names, metadata))
        for file in written.iterdir():
            file.rename(self._folder / file.name)


def _edit(file: Path, correct: Any) -> None:
    value = json.loads(file.read_text(encoding="utf-8"))
    correct(value)
    file.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _token_names(tokenizer: dict[str, Any]) -> dict[int, str]:
    vocab = tokenizer["model"]["vocab"]
    listed = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
    return {token_id: text for text, token_id in listed} | {t["id"]: t["content"] for t in tokenizer["added_tokens"]}


def _correct_tokenizer(tokenizer: dict[str, Any], metadata: Metadata) -> None:
    kind = metadata.values.get("tokenizer.ggml.pre")
    if metadata.values.get("tokenizer.ggml.model") == "gpt2":
        # Byte-level BPE has a symbol for every byte: nothing is unknown, and nothing else undoes it.
        tokenizer["model"] |= {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
        tokenizer["model"]["ignore_merges"] = kind == "llama-bpe"
        tokenizer["decoder"] = _BYTE_LEVEL
        if kind in _SPLITTERS:
            tokenizer["pre_tokenizer"] = _SPLITTERS[kind]
    bos = metadata.token("bos")
    if bos is not None and _adds_bos(metadata) and not _has_template(tokenizer.get("post_processor")):
        tokenizer["post_processor"] = _prefixed(_token_names(tokenizer)[bos], bos)


def _adds_bos(metadata: Metadata) -> bool:
    """llama.cpp's rule where the file does not say: SentencePiece models and Llama 3 do."""
    default = metadata.values.get("tokenizer.ggml.model") == "llama"
    default = default or metadata.values.get("tokenizer.ggml.pre") == "llama-bpe"
    return bool(metadata.values.get("tokenizer.ggml.add_bos_token", default))


def _has_template(processor: dict[str, Any] | None) -> bool:
    if processor is None:
        return False
    inner = processor.get("processors", [processor])
    return any(
        "SpecialToken" in piece for one in inner if one["type"] == "TemplateProcessing" for piece in one["single"]
    )


def _prefixed(text: str, token_id: int) -> dict[str, Any]:
    start = {"SpecialToken": {"id": text, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [token_id], "tokens": [text]}},
    }


def _correct_config(config: dict[str, Any], names: dict[int, str], metadata: Metadata) -> None:
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.token(theirs)
        config.pop(f"{ours}_token_id", None)
        config[f"{ours}_token"] = None if token_id is None else names.get(token_id)
    config["clean_up_tokenization_spaces"] = False
    config["add_bos_token"] = _adds_bos(metadata)
