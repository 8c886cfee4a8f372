"""A model directory's tokenizer: tokenizer.json and nothing else, through the `tokenizers` library.

Owns the mapping between text and token ids. Blocking and pure: `router.text.model` keeps it off the event loop.
Never imports transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from router.text.detokenizer import Detokenizer


class NoTokenizer(Exception):
    """The directory has no tokenizer that this program can read; str() is one sentence."""


class Tokenizer:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        backend.no_padding()
        backend.no_truncation()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        path = directory / "tokenizer.json"
        if not path.is_file():
            listing = ", ".join(sorted(entry.name for entry in directory.iterdir())[:12]) or "nothing"
            raise NoTokenizer(f"{directory} has no tokenizer.json; it holds {listing}")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception for a file that it cannot parse
            raise NoTokenizer(f"{path} cannot be read as a tokenizer: {error}") from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], keep_special_tokens: bool = False) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=not keep_special_tokens)

    def detokenizer(self, context: Sequence[int], keep_special_tokens: bool = False) -> Detokenizer:
        """For tokens that follow `context`."""
        return Detokenizer(lambda ids: self.decode(ids, keep_special_tokens), context)
