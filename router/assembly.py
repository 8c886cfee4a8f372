"""Puts the router together once its port is open, runs it, and drains it.

Owns the tasks: ticks, sessions, readiness, counts, the HTTP door. The order is fixed: model, workers,
then ready. This module imports everything heavy, so __main__ loads it after the process answers its health check.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import time
from collections.abc import Callable

from router.config import SAMPLING, CannotServe, Settings
from router.dispatch import Dispatcher
from router.driver import Driver
from router.front import Deadlines, Front
from router.metrics import Counts, Standing
from router.openai.app import build_app
from router.page.routes import add_page
from router.preparing import ServedModel, prepare
from router.servicer import GenerationService
from router.sessions import Sessions
from router.text.chat import BadTemplate
from router.text.model import TextModel
from router.text.tokenizer import NoTokenizer
from router.workers import Role
from wire import metrics, tracing
from wire.garbage import spare_collections
from wire.health import Health
from wire.http import serve
from wire.logs import get_logger

log = get_logger("router")

LOOK_S = 0.05  # how often readiness and the end of a drain are looked at
PATIENCE_S = 5.0  # how often it is said why nothing can be served, if that has changed


class Router:
    """`http` listens already and stays its owner's; `say` prints one line for whoever started the process."""

    def __init__(
        self,
        settings: Settings,
        health: Health,
        http: socket.socket,
        say: Callable[[str], None],
        spans: tracing.Tracing = tracing.OFF,
    ) -> None:
        self._settings = settings
        self._health = health
        self._say = say
        self._model = ServedModel(settings.names[0] if settings.names else settings.model)
        self._tracing = spans
        self._counts = Counts()
        self._dispatcher = Dispatcher(settings.core, random.Random(secrets.randbits(128)), time.monotonic())
        self._sessions = Sessions(f"router-{settings.port}", settings.targets, settings.security)
        self._driver = Driver(self._dispatcher, self._sessions.send)
        deadlines = Deadlines(settings.default_deadline, settings.max_deadline)
        self._front = Front(self._model.get, self._driver, self._counts, deadlines, spans)
        self.service = GenerationService(self._front)
        self._standing = Standing(self._dispatcher, self._counts, lambda: self._sessions.absent)
        self._counts.registry.register(self._standing)
        self._http = http
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set and what was running has ended, or had its grace. Raises CannotServe."""
        security = self._settings.security
        shown = metrics.shown(self._counts.registry, self._settings.metrics_compat, self._model.name)
        app = build_app(self._front, self._ready, shown, self._settings.api_key or security.token)
        add_page(app, self._front, self._dispatcher, self._ready, lambda: self._sessions.absent)
        work = [self._driver.run(), self._serve(), self._watch(stop), metrics.report(self._standing.reading, self._say)]
        work.append(serve(app, self._http, security))
        tasks = [asyncio.create_task(each) for each in work]
        stopping = asyncio.create_task(self._until_drained(stop))
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # what ended by itself did so by an error
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            self._model.close()
            await self._tracing.close()

    async def _serve(self) -> None:
        settings = self._settings
        prepared = await prepare(settings.model, settings.cache_dir, self._model.progress)
        names = settings.names or (prepared.name,)
        self._model.progress("loading the tokenizer")
        try:
            own = settings.generation_config == "auto"
            model = await asyncio.to_thread(TextModel, names, prepared.directory, own_defaults=own)
        except (NoTokenizer, BadTemplate) as error:
            raise CannotServe(str(error)) from error
        self._model.set(model)
        if model.defaults:
            told = ", ".join(f"{field} {value:g}" for field, value in model.defaults.items())
            self._say(f"{SAMPLING} {told}, of generation_config.json; --generation-config none leaves them out")
        self._dispatcher.workers.model_digest = prepared.digest
        spare_collections()
        await self._sessions.run(self._driver)

    async def _watch(self, stop: asyncio.Event) -> None:
        """Health says ready exactly while a request could be served. Whoever waits long for it hears why."""
        was_ready, said, since = False, "", time.monotonic()
        while True:
            ready = self._ready()
            if ready != was_ready:
                await self._health.set_ready(ready)
                said = "ready" if ready else self._not_ready(stop)
                self._say(said)
                was_ready, since = ready, time.monotonic()
            elif not ready and self._model.ready and time.monotonic() - since > PATIENCE_S:
                since = time.monotonic()
                if (why := self._not_ready(stop)) != said:
                    said = why
                    self._say(said)
            await asyncio.sleep(LOOK_S)

    def _ready(self) -> bool:
        return self._model.ready and self._dispatcher.workers.ready() and not self._stopping

    def _not_ready(self, stop: asyncio.Event) -> str:
        if stop.is_set():
            return "not ready: draining"
        workers = self._dispatcher.workers
        reasons = [workers.why_none(role) for role in Role if not workers.eligible(role)]
        absent = [
            f"{address} ({why})"
            for (role, address), why in sorted(self._sessions.absent.items(), key=lambda item: item[0][1])
            if not workers.eligible(role)
        ]
        return "not ready: " + "; ".join(reasons + absent)

    async def _until_drained(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._stopping = True
        self._dispatcher.close()
        grace = self._settings.grace
        until = time.monotonic() + grace
        if not self._dispatcher.idle:
            count = len(self._dispatcher.flows)
            running = f"{count} requests have" if count > 1 else "one request has"
            self._say(f"draining: {running} {grace:g} s to end; a second signal ends at once")
        while not self._dispatcher.idle and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        self._driver.hand_back()
