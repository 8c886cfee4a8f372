"""MLPerf LoadGen over gRPC: LoadGen decides when samples are sent and judges, this sends them. Needs the extra `load`.

    python -m benchmarks.loadgen --scenario Server --target-qps 4 --num-samples 100 --min-duration 10

First tokens are reported by FirstTokenComplete and answers with their number of tokens, so that LoadGen's own summary
has TTFT and TPOT. Its logs are written to --output-dir. Prompts are random tokens: this measures, and is no submission.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import math
import sys
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import mlperf_loadgen as lg  # type: ignore[import-not-found]

from benchmarks.serve.grpc_target import GrpcTarget
from benchmarks.serve.lengths import Job
from benchmarks.serve.run import prepare
from benchmarks.serve.settings import BenchError, Lengths, Settings
from engine.types import SamplingParams
from pagewire.answers import PagewireError
from pagewire.client import AsyncClient
from wire.flags import BadOption, SecurityFlags

T = TypeVar("T")
NANOSECONDS = 1_000_000  # of a millisecond


class Sut:
    """The system under test: a router, asked from an event loop in a thread of its own. Close it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loadgen-sut")
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self.failures: list[str] = []
        self._client: AsyncClient = self._run(self._open())
        try:
            self.jobs: Sequence[Job] = self._run(self._prepare())
        except BaseException:
            self.close()
            raise

    def issue(self, samples: list[lg.QuerySample]) -> None:
        """LoadGen calls this on its own thread, with one sample (Server) or all of them (Offline)."""
        pairs = [(sample.id, sample.index) for sample in samples]  # the list is LoadGen's, and gone afterwards
        self._loop.call_soon_threadsafe(self._begin, pairs)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> AsyncClient:
        return AsyncClient(self._settings.address, self._settings.security)

    async def _prepare(self) -> Sequence[Job]:
        target = GrpcTarget(self._settings)
        try:
            return await prepare(target, self._settings, await target.facts())
        finally:
            await target.close()

    def _begin(self, pairs: Sequence[tuple[int, int]]) -> None:
        for sample, index in pairs:
            task = self._loop.create_task(self._answer(sample, self.jobs[index]))
            self._tasks.add(task)  # the loop alone would not keep it
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, sample: int, job: Job) -> None:
        """LoadGen waits for every sample, so a failed one is completed too, with what it has; `failures` tells."""
        tokens = array.array("i")
        params = SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True)
        try:
            async with self._client.stream(job.prompt, params, return_text=False) as stream:
                async for delta in stream:
                    if delta.token_ids and not tokens:
                        first = array.array("i", delta.token_ids[:1])
                        lg.FirstTokenComplete([_response(sample, first)])
                    tokens.extend(delta.token_ids)
        except PagewireError as error:
            self.failures.append(f"{error.code}: {error}")
        lg.QuerySamplesComplete([_response(sample, tokens)])


def _response(sample: int, tokens: array.array[int]) -> lg.QuerySampleResponse:
    """LoadGen copies the bytes before its call returns: the caller holds them until then."""
    address, count = tokens.buffer_info()
    return lg.QuerySampleResponse(sample, address, count * tokens.itemsize, count)


def measure(sut: Sut, options: argparse.Namespace) -> None:
    """One test by LoadGen, which writes its logs and nothing to stdout."""
    settings = lg.TestSettings()
    settings.scenario = getattr(lg.TestScenario, options.scenario)
    settings.mode = lg.TestMode.PerformanceOnly
    settings.use_token_latencies = True
    settings.min_duration_ms = round(options.min_duration * 1e3)
    settings.min_query_count = options.num_samples
    if options.scenario == "Server":
        settings.server_target_qps = options.target_qps
        settings.ttft_latency = round(options.ttft * NANOSECONDS)
        settings.tpot_latency = round(options.tpot * NANOSECONDS)
    else:
        settings.offline_expected_qps = options.target_qps
    logs = lg.LogSettings()
    logs.log_output.outdir = str(options.output_dir)
    logs.log_output.copy_summary_to_stdout = False
    under_test = lg.ConstructSUT(sut.issue, sut.flush)
    samples = lg.ConstructQSL(len(sut.jobs), len(sut.jobs), lambda indices: None, lambda indices: None)
    try:
        lg.StartTestWithLogSettings(under_test, samples, settings, logs)
    finally:
        lg.DestroyQSL(samples)
        lg.DestroySUT(under_test)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051", help="the router's")
    parser.add_argument("--token-file", type=Path, help="with the deployment's token")
    parser.add_argument("--scenario", choices=["Server", "Offline"], default="Server")
    parser.add_argument("--num-samples", type=int, default=100, help="different prompts, and queries at least")
    parser.add_argument("--target-qps", type=float, default=1.0, help="queries per second (Offline: expected)")
    parser.add_argument("--min-duration", type=float, default=10.0, help="seconds")
    parser.add_argument("--ttft", type=float, default=2000.0, help="ms at the 99th percentile for a valid result")
    parser.add_argument("--tpot", type=float, default=100.0, help="ms")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("mlperf"), help="of LoadGen's logs")
    options = parser.parse_args(argv)
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        settings = Settings(
            address=options.address,
            security=SecurityFlags(options.token_file).read(),
            num_prompts=options.num_samples,
            seed=options.seed,
            request_rate=math.inf,
            lengths=Lengths(input_len=options.input_len, output_len=options.output_len),
        )
        sut = Sut(settings)
    except (BenchError, BadOption, OSError) as error:
        print(f"loadgen: {error}", file=sys.stderr)
        return 2
    try:
        measure(sut, options)
    finally:
        sut.close()
    print((options.output_dir / "mlperf_log_summary.txt").read_text("utf-8"), end="")
    if sut.failures:
        print(f"{len(sut.failures)} samples failed, the first with {sut.failures[0]}", file=sys.stderr)
    return 1 if sut.failures else 0


if __name__ == "__main__":
    sys.exit(main())
