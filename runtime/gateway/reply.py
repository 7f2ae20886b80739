"""How a request is answered: from a source into its exchange, and as a turn into the record."""

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from typing import cast

from turngate.runtime.errors import ConfigError, EndpointError, MalformedReply
from turngate.runtime.gateway.asks import ChatAsk, TextAsk
from turngate.runtime.gateway.collected import ChatChunk
from turngate.runtime.gateway.drawing import Drawing
from turngate.runtime.gateway.edits import kept_by, strip
from turngate.runtime.gateway.exchange import Exchange
from turngate.runtime.gateway.response_items import Translation
from turngate.runtime.gateway.sources import Source
from turngate.runtime.gateway.sse import DONE, SSE_HEADERS, event_piece
from turngate.runtime.gateway.upstream import refusal_of
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.session import Session
from turngate.runtime.types import Completion, Message
from turngate.runtime.urls import scrub

__all__ = ["Reply"]

_log = logging.getLogger("turngate.gateway")


class Reply:
    """Answers one request, in one of four ways; its turn is recorded when the agent has it."""

    def __init__(
        self,
        session: Session,
        source: Source,
        ask: ChatAsk | TextAsk,
        drawing: Drawing,
        messages: tuple[Message, ...],
        role: str,
        secrets: Sequence[str],
    ) -> None:
        self.session, self.source = session, source
        self._secrets = secrets
        self._keep, self._drawing = kept_by(ask), drawing
        self._is_turn = not (isinstance(ask, TextAsk) and ask.is_scoring)
        self._messages, self._role = messages, role
        self._began_s = asyncio.get_running_loop().time()

    async def answer(self, exchange: Exchange) -> None:
        """Answer in one piece."""
        with self._told():
            whole = await self.source.whole()
        exchange.finish(strip(whole.body, self._keep), self.recorder(whole.completions))

    async def stream(self, exchange: Exchange) -> None:
        """Answer as the reply comes."""
        exchange.stream(SSE_HEADERS)
        with self._told():
            async with aclosing(self.source.chunks()) as chunks:
                async for chunk in chunks:
                    exchange.write(event_piece(strip(chunk.data, self._keep)))
            completions = self.source.completions()
        exchange.finish(event_piece(DONE), self.recorder(completions))

    async def respond(self, exchange: Exchange, translation: Translation, remember: Callable[[], None]) -> None:
        """Answer in one piece, as the responses API does."""
        with self._told():
            whole = await self.source.whole()
        reply = translation.whole(whole.body, whole.completions[0])
        exchange.finish(reply, _both(self.recorder(whole.completions), remember))

    async def stream_response(self, exchange: Exchange, translation: Translation, remember: Callable[[], None]) -> None:
        """Answer as the reply comes, in events of the responses API."""
        exchange.stream(SSE_HEADERS)
        opening = translation.opening()
        with self._told():
            async with aclosing(self.source.chunks()) as chunks:
                async for chunk in chunks:
                    told = translation.chunk(cast(ChatChunk, chunk.decoded))
                    if opening or told:
                        exchange.write(opening + told)
                        opening = b""
            completions = self.source.completions()
        exchange.finish(opening + translation.closing(completions[0]), _both(self.recorder(completions), remember))

    @contextmanager
    def _told(self) -> Generator[None]:
        """Tell the session of the server's failures, and the agent what it may know of them."""
        try:
            yield
        except ConfigError as error:  # what was asked for cannot be drawn, or guided, on this server
            raise RequestError(str(error)) from error
        except EndpointError as error:
            text = scrub(str(error), self._secrets)
            self.session.failed(type(error)(text))
            if isinstance(error, MalformedReply):
                _log.warning("session %s got no completion: %s", self.session.id, text)
            raise refusal_of(error) from error

    def recorder(self, completions: Sequence[Completion]) -> Callable[[], None]:
        """Return what records the turn, to be called when the reply was delivered."""
        model_s = asyncio.get_running_loop().time() - self._began_s

        def record() -> None:
            if not self._is_turn:
                return
            if by := self._drawing.constrained_by:
                self.session.refuse_training(
                    f"the agent let only some tokens pass, by {by}: log-probs among these are not the policy's"
                )
            try:
                self.session.record(
                    completions,
                    role=self._role,
                    messages=self._messages,
                    sampling=self._drawing.recorded,
                    model_s=model_s,
                )
            except MalformedReply as error:
                # The agent has got its text, and goes on; without the ids the episode is none to train on.
                self.session.failed(error)
                _log.warning("a turn of session %s could not be recorded: %s", self.session.id, error)

        return record


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
