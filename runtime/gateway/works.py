"""From what an agent asks to the work that answers it: decoded, steered, and given a source."""

import itertools
import secrets
import time
from collections.abc import Sequence
from typing import cast

import msgspec

from turngate.runtime.conversation import token_mode_of
from turngate.runtime.endpoint import ChatEndpoint, Endpoint
from turngate.runtime.gateway.asks import ChatAsk, Fields, TextAsk, decode_chat, decode_text
from turngate.runtime.gateway.drawing import default_cap, drawing_for
from turngate.runtime.gateway.edits import chat_body, text_body
from turngate.runtime.gateway.exchange import Exchange, Work
from turngate.runtime.gateway.guests import Guest
from turngate.runtime.gateway.guided_source import GuidedSource
from turngate.runtime.gateway.keys import role_in
from turngate.runtime.gateway.rendered import Envelope
from turngate.runtime.gateway.rendered_source import RenderedSource, offered_tools
from turngate.runtime.gateway.reply import Reply
from turngate.runtime.gateway.response_items import Translation
from turngate.runtime.gateway.responses import decode_responses, output_messages
from turngate.runtime.gateway.sources import ServerSource, Source
from turngate.runtime.gateway.steering import UNGUIDED, Steered, Steering
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.session import Session
from turngate.runtime.types import Message

__all__ = ["Works"]


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
            reply = self._chat_reply(guest.session, fields, ask, chat, role, steered)
            await (reply.stream(exchange) if ask.stream else reply.answer(exchange))

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
                    lambda: text_body(fields, ask, drawing, model=endpoint.model, dialect=endpoint.dialect),
                    choices=choices,
                    timeout_s=timeout_s,
                    is_text=True,
                    prompt=prompts[0] if len(prompts) == 1 and isinstance(prompts[0], list) else (),
                )
            reply = Reply(guest.session, source, ask, drawing, messages, role, endpoint.secrets)
            await (reply.stream(exchange) if ask.stream else reply.answer(exchange))

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
            reply = self._chat_reply(guest.session, fields, ask, chat, role, steered)
            translation = Translation(asked, self._next_id("resp_"), self._model())
            exchange.failure_piece = translation.failure

            def remember() -> None:
                guest.responses.put(translation.id, [*history, *output_messages(translation.output)])

            await (reply.stream_response if ask.stream else reply.respond)(exchange, translation, remember)

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

    def _chat_reply(
        self,
        session: Session,
        fields: Fields,
        ask: ChatAsk,
        chat: tuple[Message, ...],
        role: str,
        steered: Steered,
    ) -> Reply:
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
                lambda: chat_body(fields, ask, drawing, model=endpoint.model, dialect=endpoint.dialect),
                choices=ask.n or 1,
                timeout_s=timeout_s,
            )
        else:
            envelope = Envelope(self._next_id("chatcmpl-"), int(time.time()), self._model())
            source = RenderedSource(
                session, endpoint, fields, ask, drawing, chat, envelope, timeout_s=timeout_s, guidance=guidance
            )
        return Reply(session, source, ask, drawing, chat, role, _secrets_of(endpoint))

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


def _secrets_of(endpoint: ChatEndpoint) -> Sequence[str]:
    """Return what must not be shown of an endpoint; fakes have nothing to hide."""
    return cast(Sequence[str], getattr(endpoint, "secrets", ()))
