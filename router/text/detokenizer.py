"""Tokens into text as they come, without ever splitting a character.

A character may be spread over several tokens, and a decoder may render a token differently behind other tokens
(a leading space, a run of byte tokens). So every step decodes a short window of tokens that the text before
depends on, and gives out what the window has gained. The text is a function of the tokens alone, not of how they
were chunked: a resumed request that replays its tokens continues exactly where the client's text ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
MAX_HELD_TOKENS = 3  # a character has at most four bytes, so that many tokens may end within one
WINDOW_TOKENS = 16
CONTEXT_TOKENS = 6  # prompt tokens that the first token is decoded behind


class Detokenizer:
    """`decode` maps token ids to text; `context` is the end of what precedes the first token."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-CONTEXT_TOKENS:])
        self._boundary = len(self._window)  # tokens of the window up to the last place where no character was open
        self._sent = len(decode(self._window).rstrip(REPLACEMENT)) if self._window else 0  # characters of its text
        self._held = 0  # tokens since that place

    def step(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._window.append(token_id)
        self._held += 1
        text = self._decode(self._window)
        stable = len(text.rstrip(REPLACEMENT))
        if self._held > MAX_HELD_TOKENS:  # most of these bytes are wrong; only the last may still begin a character
            stable = max(stable, len(text) - 1)
        piece = text[self._sent : stable]
        self._sent = max(self._sent, stable)
        if stable == len(text):
            self._held = 0
        if len(self._window) >= WINDOW_TOKENS:
            self._trim(len(text) - stable)
        if not self._held:
            self._boundary = len(self._window)
        return piece

    def steps(self, token_ids: Sequence[int]) -> str:
        """What `step` gives for each of them, joined: by one decode wherever all of it is whole characters."""
        text = ""
        for start in range(0, len(token_ids), WINDOW_TOKENS):
            text += self._steps(token_ids[start : start + WINDOW_TOKENS])
        return text

    def _steps(self, token_ids: Sequence[int]) -> str:
        if not self._held:
            window = [*self._window, *token_ids]
            text = self._decode(window)
            if REPLACEMENT not in text:
                piece = text[self._sent :]
                self._window, self._sent = window, len(text)
                if len(window) >= WINDOW_TOKENS:
                    self._trim(0)
                self._boundary = len(self._window)
                return piece
        return "".join(map(self.step, token_ids))

    def finish(self) -> str:
        """What is still held back: bytes that never became a character, as U+FFFD."""
        piece = self._decode(self._window)[self._sent :] if self._held else ""
        self._sent += len(piece)
        self._held = 0
        return piece

    def _trim(self, open_characters: int) -> None:
        """Forgets the oldest tokens: up to the boundary, or all but an open character's where there is none."""
        if self._held > MAX_HELD_TOKENS:
            kept = self._window[-MAX_HELD_TOKENS:]
        elif not self._held:
            kept = self._window[self._boundary :]
        else:
            return
        if length := len(self._decode(kept)):  # tokens without text are no context
            self._window, self._sent = kept, max(0, length - open_characters)
            self._boundary = 0
