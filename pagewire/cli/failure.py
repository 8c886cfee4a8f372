"""The one exception that a command ends with: a sentence for the user, never a traceback."""

from __future__ import annotations


class CommandFailed(Exception):
    """str() is what the user reads, `exit_code` what the shell sees."""

    def __init__(self, sentence: str, exit_code: int = 1) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
