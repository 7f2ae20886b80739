"""Questions to /chat/completions."""

from collections.abc import Mapping
from typing import Any

from turngate.runtime.capabilities import Finding
from turngate.runtime.probing.asking import Answer, Asker, as_ids, together
from turngate.runtime.probing.distribution import HOT, TINY_TOP_P, judge_temperature, judge_truncation
from turngate.runtime.probing.judging import (
    chat_text,
    failed,
    judge_count,
    judge_ids,
    judge_logprobs,
    judge_seeds,
    judge_stop,
    judge_stop_ids,
    judge_stream,
    judge_strings,
    judge_tool_calls,
    judge_versions,
    no,
    unknown,
    yes,
)

__all__ = ["PROMPT", "ChatProbe"]

PROMPT = "Count from one to ten."
"""What most questions say: an open beginning, short for any context."""

_PATH = "/chat/completions"
_MESSAGES = [{"role": "user", "content": PROMPT}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_TOOL_MESSAGES = [{"role": "user", "content": "Weather in Rome? Call the tool."}]
_GREEDY_TOKENS = 12
_SAMPLED_TOKENS = 8
_TOOL_TOKENS = 48

# What goes beyond the plainest request, asked for together first and one by one when that is refused.
_EXTRAS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True},
    "return_token_ids": {"return_token_ids": True},
    "id_strings": {"logprobs": True, "return_tokens_as_token_ids": True},
    "top_k": {"top_k": 0},
    "seed": {"seed": 1},
}


class ChatProbe:
    """Asks the chat route step by step; each step leaves findings and what later steps need."""

    # State: what the steps have found.
    found: dict[str, Finding]
    replies: list[Answer]  # successes, for what usage says of caches
    greedy: str  # text of the greedy reply, "" when there is none
    prompt_ids: list[int]  # as the server rendered the messages, when it says
    extras: dict[str, Any]  # fields beyond the plainest request that the server takes

    def __init__(self, asker: Asker, model: str) -> None:
        self._asker, self._model = asker, model
        self.found, self.replies, self.greedy = {}, [], ""
        self.prompt_ids, self.extras = [], {}

    def __repr__(self) -> str:
        return f"<ChatProbe {self._model}, {len(self.found)} findings>"

    async def run(self) -> None:
        """Ask everything; stops at the first question when the route does not answer."""
        # 1. Does it answer at all?
        greedy = await self._ask(temperature=0.0, max_tokens=_GREEDY_TOKENS)
        if not self._judge_greedy(greedy):
            return
        # 2. Which fields does it know?
        sampled = await self._ask_extras()
        # 3. Do they do what they say? These change nothing for each other.
        await together(self._ask_seeds(sampled), self._ask_stop(), self._ask_n(), self._ask_tools())
        if "logprobs" in self.extras:
            await self._ask_distribution()
        if "top_k" in self.extras:
            self.found["top_k"] = self._judge_top_k(await self._best_only(top_k=1))
        # 4. Alone: some servers end a stream when another request comes.
        await self._ask_stream()

    async def _ask(self, **fields: Any) -> Answer:
        body: dict[str, Any] = {"model": self._model, "messages": _MESSAGES, **fields}
        answer = await self._asker.post(_PATH, body)
        if answer.ok:
            self.replies.append(answer)
        return answer

    def _judge_greedy(self, answer: Answer) -> bool:
        if not answer.ok:
            self.found["chat"] = failed(answer)
        elif not isinstance(answer.at("choices", 0, "message"), dict):
            self.found["chat"] = no(f"no message in the reply: {answer.text[:60]}")
        else:
            self.greedy = chat_text(answer)
            self.found["chat"] = yes(f"said {self.greedy:.40}" if self.greedy else "an empty reply")
            return True
        return False

    async def _ask_extras(self) -> Answer:
        """Find out which fields are taken, and judge what they bring; return the reply that had them all, or most."""
        together_fields = _merged(_EXTRAS)
        answer = await self._sampled(together_fields)
        if answer.ok:
            self.extras = together_fields
            self._judge_ids(answer, answer)
            return answer
        apart = dict(zip(_EXTRAS, await together(*map(self._sampled, _EXTRAS.values())), strict=True))
        self.extras = _merged({name: _EXTRAS[name] for name, reply in apart.items() if reply.ok})
        for name in ("top_k", "seed"):
            if not apart[name].ok:
                self.found["seeds" if name == "seed" else name] = failed(apart[name])
        self._judge_ids(apart["return_token_ids"], apart["logprobs"], apart["id_strings"])
        return apart["seed"]

    def _judge_ids(self, with_ids: Answer, with_logprobs: Answer, with_strings: Answer | None = None) -> None:
        found = self.found
        ids = as_ids(with_ids.at("choices", 0, "token_ids"))
        self.prompt_ids = as_ids(with_ids.at("prompt_token_ids"))
        if with_ids.ok:
            found["prompt_ids"] = judge_ids(self.prompt_ids, "prompt_token_ids")
            found["sampled_ids"] = judge_ids(ids, "token_ids")
            found["versions"] = judge_versions(with_ids)
        else:
            found["prompt_ids"] = found["sampled_ids"] = failed(with_ids)
        strings = with_strings or with_logprobs
        found["id_strings"] = judge_strings(strings) if strings.ok else failed(strings)
        # Ids and log-probs of one reply must align; replies to different requests need not.
        aligned = ids if with_ids is with_logprobs else []
        found["logprobs"] = judge_logprobs(with_logprobs, aligned) if with_logprobs.ok else failed(with_logprobs)
        found["plain_logprobs"] = found["logprobs"]

    async def _sampled(self, fields: Mapping[str, Any]) -> Answer:
        return await self._ask(**{"temperature": 1.5, "max_tokens": _SAMPLED_TOKENS, **fields})

    async def _ask_seeds(self, first: Answer) -> None:
        if "seed" not in self.extras:
            return
        again, *others = await together(*(self._sampled({**self.extras, "seed": seed}) for seed in (1, 2, 3)))
        self.found["seeds"] = judge_seeds(first, again, others, _said)

    async def _ask_n(self) -> None:
        self.found["n"] = judge_count(await self._ask(n=2, temperature=1.0, max_tokens=4), 2)

    async def _ask_stop(self) -> None:
        stop = _stop_in(self.greedy)
        if not stop:
            self.found["stop"] = unknown("the greedy reply has nothing to stop at")
            return
        spelled = {"logprobs": True} if "logprobs" in self.extras else {}
        answer = await self._ask(temperature=0.0, max_tokens=_GREEDY_TOKENS, stop=[stop], **spelled)
        self.found["stop"] = judge_stop(answer, self.greedy, stop)
        if self.found["stop"].is_yes:
            self.found["stop_ids"] = judge_stop_ids(answer, stop)

    async def _ask_tools(self) -> None:
        answer = await self._ask(messages=_TOOL_MESSAGES, tools=[_TOOL], temperature=0.0, max_tokens=_TOOL_TOKENS)
        self.found["tools"], self.found["tool_calls"] = judge_tool_calls(answer, "get_weather")

    async def _ask_stream(self) -> None:
        ids = {"return_token_ids": True} if "return_token_ids" in self.extras else {}
        answer = await self._ask(temperature=0.0, max_tokens=_GREEDY_TOKENS, stream=True, **ids)
        self.found["streaming"], self.found["stream_ids"] = judge_stream(answer, self.greedy)

    async def _ask_distribution(self) -> None:
        """Ask for alternatives of one context under different settings; log-probs may come with them alone."""
        top = 20
        at_one = await self._top(1.0, top)
        if at_one.was_refused:
            top = 5
            at_one = await self._top(1.0, top)
        if not self.found["logprobs"].is_yes and at_one.ok:
            with_top = judge_logprobs(at_one)
            self.found["logprobs"] = with_top
            self.found["plain_logprobs"] = no("they come only with top_logprobs") if with_top.is_yes else with_top
        if not self.found["logprobs"].is_yes:
            return
        hot = await self._top(HOT, top)
        self.found["follows_temperature"] = judge_temperature(at_one, hot, HOT)
        cut = await self._best_only(logprobs=True, top_logprobs=1, top_p=TINY_TOP_P)
        self.found["follows_truncation"] = judge_truncation(at_one, hot, cut)

    async def _top(self, temperature: float, count: int) -> Answer:
        fields = {**self.extras, "logprobs": True, "top_logprobs": count}
        return await self._ask(temperature=temperature, top_p=1.0, max_tokens=1, **fields)

    async def _best_only(self, **fields: Any) -> Answer:
        """Ask hot, but for the likeliest tokens alone: the text is the greedy one if the server heeds that."""
        return await self._ask(temperature=HOT, max_tokens=_GREEDY_TOKENS, **fields)

    def _judge_top_k(self, answer: Answer) -> Finding:
        if not answer.ok:
            return failed(answer)
        if not self.greedy:
            return unknown("the greedy reply is empty")
        alike = chat_text(answer) == self.greedy
        return yes("top_k=1 is greedy") if alike else no("top_k=1 is not greedy: accepted without effect")


def _merged(extras: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {field: value for fields in extras.values() for field, value in fields.items()}


def _said(answer: Answer) -> object:
    return as_ids(answer.at("choices", 0, "token_ids")) or chat_text(answer)


def _stop_in(text: str) -> str:
    """Return a stop string from within a text, two characters of its second half, or the last one of a short text."""
    found = [text[start : start + 2] for start in range(len(text) // 2, len(text) - 2)] + [text[-1:]]
    return next((s for s in found if s.strip() == s != "" and s.isprintable() and "\ufffd" not in s), "")
