"""What users import: `Client` and `AsyncClient` talk to a router, `LLM` and `AsyncLLMEngine` run an engine in this
process, `SamplingParams` says how to choose tokens, `Security` what a protected router wants to see.

Each name is imported when it is first used, so that `import pagewire` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.types import FinishReason, SamplingParams
    from pagewire.async_engine import AsyncLLMEngine
    from pagewire.client import AsyncClient, Client, PagewireError, Result
    from pagewire.engine_args import EngineArgs
    from pagewire.llm import LLM
    from pagewire.outputs import CompletionOutput, RequestOutput
    from wire.security import Security

    __version__: str

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLMEngine",
    "Client",
    "CompletionOutput",
    "EngineArgs",
    "FinishReason",
    "PagewireError",
    "RequestOutput",
    "Result",
    "SamplingParams",
    "Security",
    "__version__",
]

_HOMES = {
    "AsyncClient": "pagewire.client",
    "AsyncLLMEngine": "pagewire.async_engine",
    "Client": "pagewire.client",
    "CompletionOutput": "pagewire.outputs",
    "EngineArgs": "pagewire.engine_args",
    "FinishReason": "engine.types",
    "LLM": "pagewire.llm",
    "PagewireError": "pagewire.answers",
    "RequestOutput": "pagewire.outputs",
    "Result": "pagewire.client",
    "SamplingParams": "engine.types",
    "Security": "wire.security",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from wire.version import VERSION

        return VERSION
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pagewire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
