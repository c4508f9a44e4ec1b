"""Serves a model over HTTP as OpenAI's clients expect it, one answer at a time."""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pippin.engines import Sampling
from pippin.errors import PippinError, UsageError
from pippin.recipe import Data
from pippin.stages.completions import Asked, BadRequest, Kind, Shape, failure, read_request
from pippin.stages.generate import Speaker
from pippin.stages.speech import Answer, Until

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(kw_only=True, slots=True)
class Desk:
    """A model that answers one request after another.

    All of its work happens in one thread: MLX's arrays belong to the thread that made them, so
    `worker` is also where `speaker` must have been loaded. `defaults` is for what a request leaves
    out.
    """

    name: str
    speaker: Speaker
    worker: ThreadPoolExecutor
    defaults: Sampling
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ask(self, asked: Asked) -> Answer:
        """The answer, not yet begun; raises PippinError for what cannot be asked."""
        # What a client said is not left out behind its back.
        speaker = replace(self.speaker, trims=False)
        if asked.kind == "text":  # goes on with the text itself, whatever the model was tuned on
            speaker = replace(speaker, data=Data(source="", format="text"))
        return await self._work(partial(speaker.say, asked.said, asked.sampling))

    async def pieces(self, answer: Answer, until: Until) -> AsyncIterator[str]:
        """The answer's text as it comes, up to a stop text."""
        async with self.turn:
            source = iter(answer)
            while not until.found:
                piece = await self._work(partial(next, source, None))
                if piece is None:
                    break
                if text := until.add(piece):
                    yield text
        if text := until.end():
            yield text

    async def _work(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.worker, call)


def application(desk: Desk, host: str) -> Starlette:
    """The routes: chat completions, completions, models, health."""
    started = int(time.time())
    model = {"id": desk.name, "object": "model", "created": started, "owned_by": "pippin"}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    routes = [
        Route("/v1/chat/completions", partial(_complete, desk, "chat"), methods=["POST"]),
        Route("/v1/completions", partial(_complete, desk, "text"), methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    # A web page must not reach a server of this machine's own under a name that it chose.
    hosts = [*LOOPBACK, "[::1]"] if host in LOOPBACK else ["*"]
    return Starlette(
        routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    )


async def _complete(desk: Desk, kind: Kind, request: Request) -> Response:
    try:
        asked = read_request(kind, await _body(request), desk.defaults)
        answer = await desk.ask(asked)
    except PippinError as error:
        return JSONResponse(failure(error), status_code=400)
    shape, until = Shape.of(asked, desk.name), Until(asked.stops)
    if asked.stream:
        return StreamingResponse(
            _events(desk, answer, shape, until), media_type="text/event-stream"
        )
    text = ""
    async for piece in desk.pieces(answer, until):
        text += piece
        if await request.is_disconnected():
            return Response(status_code=499)
    return JSONResponse(shape.whole(text, answer, _reason(answer, until)))


async def _events(desk: Desk, answer: Answer, shape: Shape, until: Until) -> AsyncIterator[str]:
    for chunk in shape.first():
        yield _event(chunk)
    async for piece in desk.pieces(answer, until):
        yield _event(shape.piece(piece))
    for chunk in shape.last(answer, _reason(answer, until)):
        yield _event(chunk)
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


def _reason(answer: Answer, until: Until) -> str:
    return "length" if answer.cut and not until.found else "stop"


async def _body(request: Request) -> Any:
    # Browsers send JSON to another site only after asking it; text they send at once.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise BadRequest("the body is not marked as JSON", "Content-Type: application/json", "")
    try:
        return await request.json()
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}", "send a JSON object", "") from None


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections; port 0 is any free one. UsageError where it cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else error
        raise UsageError(
            f"cannot listen on {host}, port {port}: {reason}", "choose another: --port, --host"
        ) from None


def run(app: Starlette, listener: socket.socket) -> None:
    """Answer until Ctrl-C; answers that are still coming are then cut."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off"
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        return  # the way a server is meant to end
