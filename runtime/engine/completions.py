"""The endpoints that run the model: chat completions, text completions, and values of states."""

import itertools
import secrets
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from turngate.runtime.engine.chat import parse_reply, render
from turngate.runtime.engine.generation import Generation, choice_seed, overloaded
from turngate.runtime.engine.model_thread import ModelThread
from turngate.runtime.engine.protocol import (
    ChatRequest,
    CompletionRequest,
    PoolingRequest,
    decode_request,
)
from turngate.runtime.engine.replies import (
    OMIT,
    AssistantMessage,
    ChatChoice,
    ChatReply,
    CompletionChoice,
    CompletionReply,
    Pooled,
    PoolingReply,
    chat_logprobs,
    completion_logprobs,
    implied_space,
    now_s,
    tool_call_parts,
    usage_of,
)
from turngate.runtime.engine.request import Finished, Request
from turngate.runtime.engine.streaming import ChatStream, CompletionStream, Envelope, send_stream
from turngate.runtime.engine.tokenizer import StreamDecoder, Tokenizer
from turngate.runtime.errors import ConfigError
from turngate.runtime.openai_api.refusals import JSON_HEADERS, RequestError
from turngate.runtime.openai_api.sampling_fields import SamplingFields, prompts_of
from turngate.runtime.types import TokenGuidance

__all__ = ["Completions"]

_TEXT_TOKENS = 16
"""OpenAI's default length of text completions; chat completions have none."""
_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_POOLING = msgspec.json.Decoder(PoolingRequest)
_ENCODER = msgspec.json.Encoder()

AskT = TypeVar("AskT", ChatRequest, CompletionRequest)


class Completions:
    """Turns HTTP requests into sequences and finished sequences into replies."""

    def __init__(
        self, thread: ModelThread, tokenizer: Tokenizer, *, model_name: str, max_context: int, max_open: int
    ) -> None:
        """Hold the parts.

        Args: max_context: tokens of prompt and completion together. max_open: sequences running and waiting.
        """
        self._thread = thread
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_context = max_context
        self._max_open = max_open
        self._id_root = secrets.token_hex(8)
        self._ids = itertools.count()

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        ask = decode_request(_CHAT, await http.read())
        self._check(ask)
        prompt = self._render(ask)
        limit = ask.max_tokens if ask.max_completion_tokens is None else ask.max_completion_tokens
        max_tokens = self._max_tokens(prompt, limit, "messages")
        top = ask.top_logprobs or 0
        with Generation(self._thread, self._requests(ask, [(prompt, max_tokens)], top)) as generation:
            envelope = self._envelope("chatcmpl")
            if ask.stream:
                return await send_stream(http, generation, ChatStream(ask, envelope, prompt, self._tokenizer))
            finished = await generation.finished()
        return _reply(self._chat_reply(ask, envelope, prompt, finished))

    async def complete(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        ask = decode_request(_COMPLETION, await http.read())
        self._check(ask)
        if ask.echo and ask.stream:
            raise RequestError("echo must not come with stream: true; score prompts without streaming", param="echo")
        prompts = [self._encode(prompt) for prompt in prompts_of(ask.prompt)]
        jobs = [(prompt, self._max_tokens(prompt, ask.max_tokens, "prompt", _TEXT_TOKENS)) for prompt in prompts]
        with Generation(self._thread, self._requests(ask, jobs, ask.logprobs or 0)) as generation:
            envelope = self._envelope("cmpl")
            if ask.stream:
                return await send_stream(http, generation, CompletionStream(ask, envelope, prompts, self._tokenizer))
            finished = await generation.finished()
        return _reply(self._completion_reply(ask, envelope, prompts, finished))

    async def pool(self, http: web.Request) -> web.StreamResponse:
        """POST /pooling: the value of the state after the last token of each input."""
        ask = decode_request(_POOLING, await http.read())
        self._check(ask)
        inputs = [self._encode(entry, "input") for entry in prompts_of(ask.input, "input")]
        self._check_room(len(inputs), "inputs", "input")
        if max(map(len, inputs)) > self._max_context:
            raise RequestError(
                f"input must fit the context of {self._max_context} tokens: got {max(map(len, inputs))}; shorten it",
                param="input",
                code="context_length_exceeded",
            )
        envelope, finished = self._envelope("pool"), await self._values(inputs)
        reply = PoolingReply(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            data=[Pooled(index, [one.value]) for index, one in enumerate(finished) if one.value is not None],
            usage=usage_of(inputs, finished, 1),
            value_version=finished[0].value_version,
        )
        return web.Response(body=_ENCODER.encode(reply), headers=JSON_HEADERS)

    async def _values(self, inputs: Sequence[list[int]]) -> list[Finished]:
        """Return the values of all inputs under one critic: they are compared with one another.

        Where it was replaced in between, what the old one valued is valued again.
        """
        found: dict[int, Finished] = {}
        old = list(range(len(inputs)))
        while old:
            asked = [Request(prompt_ids=inputs[index], max_tokens=0, value=True) for index in old]
            with Generation(self._thread, asked) as generation:
                found |= zip(old, await generation.finished(), strict=True)
            newest = max(one.value_version for one in found.values())
            old = [index for index, one in found.items() if one.value_version < newest]
        return [found[index] for index in range(len(inputs))]

    # From the wire to the batcher.

    def _check(self, ask: SamplingFields | PoolingRequest) -> None:
        if ask.model is not None and ask.model != self._model_name:
            raise RequestError(
                f"model must be {self._model_name!r}: got {ask.model!r}; see /v1/models",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _render(self, ask: ChatRequest) -> list[int]:
        tools = () if ask.tool_choice == "none" else ask.tools or ()
        try:
            messages = [message.as_message() for message in ask.messages]
            return render(messages, self._tokenizer, tools=[tool.as_spec() for tool in tools])
        except ConfigError as error:
            raise RequestError(str(error), param="messages") from None

    def _encode(self, prompt: str | list[int], param: str = "prompt") -> list[int]:
        if isinstance(prompt, str):
            try:
                prompt = self._tokenizer.encode(prompt)
            except ConfigError as error:
                raise RequestError(str(error), param=param) from None
        if not prompt:
            raise RequestError(f"{param} must hold at least one token: got none", param=param)
        if min(prompt) < 0 or max(prompt) >= len(self._tokenizer):
            raise RequestError(
                f"{param} must hold ids in [0, {len(self._tokenizer)}): got {min(prompt)} to {max(prompt)}",
                param=param,
            )
        return prompt

    def _max_tokens(self, prompt: Sequence[int], asked: int | None, param: str, default: int | None = None) -> int:
        """Return the cap on generated tokens; what nothing caps may run to the end of the context."""
        room = self._max_context - len(prompt)
        if room < (1 if asked is None else asked):
            wanted = "" if asked is None else f" and {asked} in the completion (max_tokens)"
            raise RequestError(
                f"prompt and completion must fit the context of {self._max_context} tokens: "
                f"got {len(prompt)} in the {param}{wanted}; shorten either",
                param=param,
                code="context_length_exceeded",
            )
        if asked is None:
            return room if default is None else min(default, room)
        return asked

    def _requests(self, ask: AskT, jobs: Sequence[tuple[list[int], int]], top_logprobs: int) -> list[Request]:
        """Return one batcher request per prompt and choice, the choices of one prompt being neighbours."""
        n = ask.n or 1
        self._check_room(n * len(jobs))
        echo = (
            isinstance(ask, CompletionRequest) and bool(ask.echo) and (ask.logprobs is not None or not ask.max_tokens)
        )
        guided = ask.guidance
        guidance = None
        if guided is not None:
            try:
                guidance = TokenGuidance(beta=guided.beta, top_k=guided.top_k, tail=guided.tail)
            except ConfigError as error:
                raise RequestError(str(error), param="guidance") from None
        return [
            Request(
                prompt_ids=prompt,
                max_tokens=max_tokens,
                temperature=1.0 if ask.temperature is None else ask.temperature,
                top_p=1.0 if ask.top_p is None else ask.top_p,
                top_k=max(0, ask.top_k or 0),
                seed=choice_seed(ask.seed, choice),
                stop=ask.stops,
                top_logprobs=top_logprobs,
                echo=echo,
                stream=bool(ask.stream),
                guidance=guidance,
            )
            for prompt, max_tokens in jobs
            for choice in range(n)
        ]

    def _check_room(self, sequences: int, what: str = "n times prompts", param: str = "n") -> None:
        if sequences > self._max_open:
            raise RequestError(
                f"{what} must be at most {self._max_open}: got {sequences}; split the request", param=param
            )
        if self._thread.open + sequences > self._max_open:
            raise overloaded(
                f"the engine must have room for {sequences} more sequences: got {self._thread.open} of "
                f"{self._max_open} taken; try again later"
            )

    def _envelope(self, prefix: str) -> Envelope:
        # A counter behind one random part: a random number per request costs a tenth of the whole request.
        return Envelope(f"{prefix}-{self._id_root}{next(self._ids):08x}", now_s(), self._model_name)

    # From the batcher to the wire.

    def _chat_reply(
        self, ask: ChatRequest, envelope: Envelope, prompt: list[int], finished: list[Finished]
    ) -> ChatReply:
        return ChatReply(
            id=envelope.id,
            object="chat.completion",
            created=envelope.created,
            model=envelope.model,
            choices=[self._chat_choice(ask, envelope, index, one) for index, one in enumerate(finished)],
            usage=usage_of([prompt], finished, len(finished)),
            prompt_token_ids=prompt if ask.return_token_ids else OMIT,
            policy_version=max(one.policy_version for one in finished),
            value_version=min(one.value_version for one in finished) if ask.guidance else OMIT,
        )

    def _chat_choice(self, ask: ChatRequest, envelope: Envelope, index: int, one: Finished) -> ChatChoice:
        message, finish_reason = AssistantMessage(one.text), str(one.finish_reason)
        if ask.tools:
            said = parse_reply(one.token_ids, self._tokenizer, call_id_prefix=f"call_{envelope.id[-8:]}_{index}")
            if said.tool_calls:
                message = AssistantMessage(said.text or None, tool_call_parts(said.tool_calls))
                finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        logprobs = None
        if ask.logprobs:
            decoder = StreamDecoder(self._tokenizer, skip_special=False)
            logprobs = chat_logprobs(
                decoder,
                self._tokenizer,
                one.token_ids,
                one.logprobs,
                one.top_logprobs,
                by_id=ask.return_tokens_as_token_ids,
            )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=logprobs,
            finish_reason=finish_reason,
            token_ids=one.token_ids if ask.return_token_ids else OMIT,
            policy_versions=one.versions,
            base_logprobs=one.base_logprobs if ask.guidance else OMIT,
            value_versions=one.value_versions if ask.guidance else OMIT,
        )

    def _completion_reply(
        self, ask: CompletionRequest, envelope: Envelope, prompts: list[list[int]], finished: list[Finished]
    ) -> CompletionReply:
        n = ask.n or 1
        return CompletionReply(
            id=envelope.id,
            object="text_completion",
            created=envelope.created,
            model=envelope.model,
            choices=[
                self._completion_choice(ask, index, prompts[index // n], one) for index, one in enumerate(finished)
            ],
            usage=usage_of(prompts, finished, n),
            prompt_token_ids=prompts[0] if ask.return_token_ids and len(prompts) == 1 else OMIT,
            policy_version=max(one.policy_version for one in finished),
            value_version=min(one.value_version for one in finished) if ask.guidance else OMIT,
        )

    def _completion_choice(
        self, ask: CompletionRequest, index: int, prompt: list[int], one: Finished
    ) -> CompletionChoice:
        tokenizer = self._tokenizer
        decoder = StreamDecoder(tokenizer, skip_special=False)
        ids, values, top = one.token_ids, list[float | None](one.logprobs), one.top_logprobs
        text = implied_space(tokenizer, prompt, ids) + one.text if one.text else ""
        if ask.echo:
            text = tokenizer.decode(prompt) + text
            ids, values = [*prompt, *ids], [*(one.prompt_logprobs or ()), *values]
            top = [*one.prompt_top_logprobs, *top]
        else:
            decoder.push_bytes(prompt[-1])
        logprobs = None
        if ask.logprobs is not None:
            logprobs = completion_logprobs(decoder, tokenizer, ids, values, top, by_id=ask.return_tokens_as_token_ids)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=one.finish_reason,
            token_ids=one.token_ids if ask.return_token_ids else OMIT,
            prompt_token_ids=prompt if ask.return_token_ids else OMIT,
            policy_versions=one.versions,
            base_logprobs=one.base_logprobs if ask.guidance else OMIT,
            value_versions=one.value_versions if ask.guidance else OMIT,
        )


def _reply(reply: ChatReply | CompletionReply) -> web.Response:
    return web.Response(body=_ENCODER.encode(reply), headers=JSON_HEADERS)
