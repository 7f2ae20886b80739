"""From what an agent asks to what it gets, and to the turn in the record."""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from typing import cast

import msgspec

from turngate.runtime.conversation import token_mode_of
from turngate.runtime.endpoint import ChatEndpoint, Endpoint
from turngate.runtime.errors import ConfigError, EndpointError, MalformedReply
from turngate.runtime.gateway.asks import ChatAsk, Fields, TextAsk, decode_chat, decode_text
from turngate.runtime.gateway.collected import ChatChunk
from turngate.runtime.gateway.drawing import Drawing, default_cap, drawing_for
from turngate.runtime.gateway.edits import chat_body, kept_by, strip, text_body
from turngate.runtime.gateway.exchange import Exchange, Work
from turngate.runtime.gateway.guests import Guest
from turngate.runtime.gateway.guided_source import GuidedSource
from turngate.runtime.gateway.keys import role_in
from turngate.runtime.gateway.rendered import Envelope
from turngate.runtime.gateway.rendered_source import RenderedSource, offered_tools
from turngate.runtime.gateway.response_items import Translation
from turngate.runtime.gateway.responses import decode_responses, output_messages
from turngate.runtime.gateway.sources import ServerSource, Source
from turngate.runtime.gateway.sse import DONE, SSE_HEADERS, event_piece
from turngate.runtime.gateway.steering import UNGUIDED, Steered, Steering
from turngate.runtime.gateway.upstream import refusal_of
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.session import Session
from turngate.runtime.types import Completion, Message
from turngate.runtime.urls import scrub

__all__ = ["Works"]

_log = logging.getLogger("turngate.gateway")


class Works:
    """Turns the body of a request into the work that answers it; one per gateway."""

    def __init__(self, endpoint: ChatEndpoint, steering: Steering, *, timeout_s: float) -> None:
        """Args: steering: says which replies are guided. timeout_s: for the upstream's whole answer."""
        self.endpoint, self.steering = endpoint, steering
        self._timeout_s, self._cap = timeout_s, default_cap(endpoint)
        self._id_root = secrets.token_hex(8)
        self._ids = itertools.count()

    # One method per API. They decode, and raise RequestError for what cannot be; nothing has been sent by then.

    def chat(self, guest: Guest, body: bytes, role: str, steer: str = "") -> Work:
        """POST /v1/chat/completions."""
        fields, ask = decode_chat(body)
        role = role or role_in(ask.model)
        chat = tuple(message.as_message() for message in ask.messages)
        steered = self.steering.of(guest.session, ask.model, steer)

        async def work(exchange: Exchange) -> None:
            turn = self._chat_turn(guest.session, fields, ask, chat, role, steered)
            await (turn.stream(exchange) if ask.stream else turn.answer(exchange))

        return Work(work, self._requests(guest.session, steered, ask.n or 1))

    def text(self, guest: Guest, body: bytes, role: str, steer: str = "") -> Work:
        """POST /v1/completions. Scoring, with echo and nothing to generate, is no turn."""
        fields, ask = decode_text(body)
        role = role or role_in(ask.model)
        endpoint = self.endpoint
        if not isinstance(endpoint, Endpoint):
            raise RequestError("text completions need a server behind the gateway", status=404, code="not_found")

        steered = self._text_steered(guest.session, ask, steer)
        guidance, timeout_s, prompts = steered.actions, self._timeout_s, ask.prompts
        choices = (ask.n or 1) * len(prompts)
        messages = tuple(Message("user", one) for one in prompts if isinstance(one, str)) or (Message("user", ""),)

        async def work(exchange: Exchange) -> None:
            drawing = drawing_for(fields, ask, guest.session, cap=self._cap)
            source: Source
            if guidance is not None:
                source = GuidedSource(
                    guest.session, endpoint, fields, ask, drawing, messages, guidance, timeout_s=timeout_s
                )
            else:
                source = ServerSource(
                    endpoint,
                    "/completions",
                    lambda: text_body(fields, ask, drawing, model=endpoint.model, dialect=endpoint.dialect),
                    choices=choices,
                    timeout_s=timeout_s,
                    is_text=True,
                    prompt=prompts[0] if len(prompts) == 1 and isinstance(prompts[0], list) else (),
                )
            turn = _Turn(guest.session, source, ask, drawing, messages, role, endpoint.secrets)
            await (turn.stream(exchange) if ask.stream else turn.answer(exchange))

        return Work(work, choices * guidance.draws if guidance is not None else 1)

    def responses(self, guest: Guest, body: bytes, role: str, steer: str = "") -> Work:
        """POST /v1/responses: a chat completion under the hood."""
        asked = decode_responses(body)
        role = role or role_in(asked.model)
        chat_json, history = asked.as_chat(guest.responses)
        fields, ask = decode_chat(chat_json)
        chat = tuple(message.as_message() for message in ask.messages)
        steered = self.steering.of(guest.session, asked.model, steer)

        async def work(exchange: Exchange) -> None:
            turn = self._chat_turn(guest.session, fields, ask, chat, role, steered)
            translation = Translation(asked, self._next_id("resp_"), self._model())
            exchange.failure_piece = translation.failure

            def remember() -> None:
                guest.responses.put(translation.id, [*history, *output_messages(translation.output)])

            await (turn.stream_response if ask.stream else turn.respond)(exchange, translation, remember)

        return Work(work, self._requests(guest.session, steered, ask.n or 1))

    def _text_steered(self, session: Session, ask: TextAsk, steer: str) -> Steered:
        """Return how a text completion is guided. Raises: RequestError: it cannot be."""
        steered = self.steering.of(session, ask.model, steer)
        if _guides_tokens(session, steered) and not ask.is_scoring:
            raise RequestError("guidance of tokens must be asked for with chats: got a text completion", param="prompt")
        if ask.is_scoring and steered.is_asked:
            raise RequestError("echo has nothing to choose: expected the base model, without guidance", param="echo")
        return UNGUIDED if ask.is_scoring else steered

    async def look_ahead(self, session: Session, path: str, body: bytes) -> None:
        """Let the session learn what the model would have been shown, if it wants to; text completions do not say."""
        if path.endswith("/chat/completions"):
            _, ask = decode_chat(body)
            await session.look_ahead(tuple(message.as_message() for message in ask.messages), offered_tools(ask))

    def _chat_turn(
        self,
        session: Session,
        fields: Fields,
        ask: ChatAsk,
        chat: tuple[Message, ...],
        role: str,
        steered: Steered,
    ) -> "_Turn":
        drawing = drawing_for(fields, ask, session, cap=self._cap)
        if steered.tokens is not None:
            sampling = msgspec.structs.replace(drawing.sampling, guidance=steered.tokens)
            drawing = drawing._replace(sampling=sampling)
        guidance, timeout_s = steered.actions, self._timeout_s
        source: Source
        endpoint = self.endpoint
        is_servers = self._is_servers(session, steered)
        if isinstance(endpoint, Endpoint) and is_servers and guidance is not None:
            source = GuidedSource(session, endpoint, fields, ask, drawing, chat, guidance, timeout_s=timeout_s)
        elif isinstance(endpoint, Endpoint) and is_servers:
            source = ServerSource(
                endpoint,
                "/chat/completions",
                lambda: chat_body(fields, ask, drawing, model=endpoint.model, dialect=endpoint.dialect),
                choices=ask.n or 1,
                timeout_s=timeout_s,
            )
        else:
            envelope = Envelope(self._next_id("chatcmpl-"), int(time.time()), self._model())
            source = RenderedSource(
                session, endpoint, fields, ask, drawing, chat, envelope, timeout_s=timeout_s, guidance=guidance
            )
        return _Turn(session, source, ask, drawing, chat, role, secrets_of(endpoint))

    def _is_servers(self, session: Session, steered: Steered) -> bool:
        """Whether the reply is the server's own; else it is put together here, choice by choice."""
        # Guidance of tokens is asked for, and recorded, by the endpoint itself.
        is_rendered = not isinstance(self.endpoint, Endpoint) or token_mode_of(self.endpoint) == "tokens"
        return not is_rendered and not _guides_tokens(session, steered)

    def _requests(self, session: Session, steered: Steered, choices: int) -> int:
        """Return how many requests to the server a chat makes at once."""
        if steered.actions is not None:
            return choices * steered.actions.draws
        return 1 if self._is_servers(session, steered) else choices

    def _next_id(self, prefix: str) -> str:
        # A counter behind one random part: a random number per request would cost more than all the rest of it.
        return f"{prefix}{self._id_root}{next(self._ids):08x}"

    def _model(self) -> str:
        return cast(str, getattr(self.endpoint, "model", "policy"))


def _guides_tokens(session: Session, steered: Steered) -> bool:
    """Whether the server is to guide tokens, as the request asks or the session pins."""
    pinned = session.sampling.guidance if session.sampling is not None else None
    return pinned is not None or steered.tokens is not None


def secrets_of(endpoint: ChatEndpoint) -> Sequence[str]:
    """Return what must not be shown of an endpoint; fakes have nothing to hide."""
    return cast(Sequence[str], getattr(endpoint, "secrets", ()))


class _Turn:
    """One reply on its way from its source to the agent and into the record."""

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
