"""Locust users that stream from a router over gRPC. Needs the extra `load`; locust's own flags choose users and time.

    locust -f benchmarks/locustfile.py --headless --host 127.0.0.1:50051 --users 8 --run-time 30s --output-len 32

Three lines of Locust's table for each request: the whole stream, its time to the first token (TTFT), and its time per
output token after that (TPOT). A request that fails is a failure of Locust with the client's sentence. A token file
comes from PAGEWIRE_TOKEN_FILE, as for every command.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import grpc.experimental.gevent
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser

# Locust puts this folder first, where engine.py and router.py would hide the packages of these names.
sys.path[:] = [place for place in sys.path if Path(place) != Path(__file__).parent]

from benchmarks.serve.lengths import TEXT  # noqa: E402
from engine.types import SamplingParams  # noqa: E402
from pagewire.answers import PagewireError  # noqa: E402
from pagewire.client import Client  # noqa: E402
from wire.flags import SecurityFlags  # noqa: E402

grpc.experimental.gevent.init_gevent()  # blocking stubs give way to other users


@events.init_command_line_parser.add_listener
def _flags(parser: LocustArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of an answer")


class PagewireUser(User):
    """One stream at a time, the next as soon as it has ended."""

    host = "127.0.0.1:50051"
    wait_time = constant(0)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        options: Any = environment.parsed_options
        self._input_len, output_len = options.input_len, options.output_len
        self._params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        token_file = os.environ.get("PAGEWIRE_TOKEN_FILE")
        security = SecurityFlags(Path(token_file) if token_file else None).read()
        self._client = Client(str(self.host).removeprefix("grpc://"), security)
        self._ids: list[int] = []

    def on_start(self) -> None:
        try:
            self._ids = sorted(set(self._client.tokenize(TEXT, add_special_tokens=False)))
        except PagewireError as error:
            self._report("Tokenize", 0.0, failure=error)
            raise StopUser from None

    def on_stop(self) -> None:
        self._client.close()

    @task
    def stream(self) -> None:
        prompt = random.choices(self._ids, k=self._input_len)
        first = last = began = time.perf_counter()
        tokens = 0
        failure: PagewireError | None = None
        try:
            with self._client.stream(prompt, self._params) as stream:
                for delta in stream:
                    if delta.token_ids:
                        last = time.perf_counter()
                        first = first if tokens else last
                        tokens += len(delta.token_ids)
        except PagewireError as error:
            failure = error
        self._report("GenerateStream", (time.perf_counter() - began) * 1e3, tokens, failure)
        if failure is None:
            self._report("TTFT", (first - began) * 1e3)
            self._report("TPOT", (last - first) * 1e3 / max(1, tokens - 1))

    def _report(self, name: str, milliseconds: float, tokens: int = 0, failure: PagewireError | None = None) -> None:
        self.environment.events.request.fire(
            request_type="grpc",
            name=name,
            response_time=milliseconds,
            response_length=tokens,
            exception=failure,
            context={},
        )
