"""A chat whose ids we keep: rendered once, extended by what is new, with a branch for every way it went on.

An episode's requests need not be one line. Sub-agents have chats of their own, histories get rewritten, several answers
are asked for at once. Each request goes on from the longest chat that it shows word for word, ids as they were sampled;
one that goes on from nothing is rendered whole, and its record starts a new segment.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from turngate.envs.base import ToolSpec
from turngate.runtime.errors import ConfigError, EndpointRefused, MalformedReply
from turngate.runtime.json_ids import JsonIds, ids_text
from turngate.runtime.recorded_chat import RecordedChat
from turngate.runtime.rendering import Renderer, says_the_same
from turngate.runtime.types import Completion, Message, Sampling

__all__ = ["Generate", "TokenConversation"]

_MAX_BRANCHES = 32
"""Branches remembered, the newest. A forgotten one costs a rendering and a segment; each holds an episode's ids."""
_CALL_ID = re.compile(r"call_([0-9]{1,9})_")
"""What calls are named here; agents may bring names of any length."""


class Generate(Protocol):
    """Continues a prompt of ids, as `Endpoint.generate` does."""

    async def __call__(
        self, prompt: Sequence[int], sampling: Sampling, /, *, seed: int | None = None, timeout_s: float = ...
    ) -> Completion: ...


class _Answer(NamedTuple):
    """Where a branch has something sampled, after which it can be gone on with."""

    messages: int
    """Messages of the branch up to and with the answer."""
    end: int
    """Length of the branch's text up to and with the answer's ids."""
    length: int
    """Number of ids up to and with the answer's."""
    token_ids: Sequence[int]


class _Branch:
    """One way a chat went: its messages, and its ids as JSON text, which every request needs whole."""

    # Changed by add(): all of it.
    __slots__ = ("answers", "messages", "prompt", "sampled", "tools")

    def __init__(self, tools: tuple[ToolSpec, ...], answers: Sequence[_Answer]) -> None:
        self.tools = tools
        self.messages: list[Message] = []
        self.answers = list(answers)
        self.prompt = b"[]"
        """The last prompt, shared with its completion's `prompt_token_ids`."""
        self.sampled = b""
        """The ids that were sampled after it, without brackets."""

    def add(self, shown: list[Message], answer: Message, prompt: JsonIds, token_ids: Sequence[int]) -> None:
        """Remember an answer to `shown`, a list that is ours from now on."""
        shown.append(answer)
        self.messages = shown  # not the list before and more: calls may have got other ids, which compare slower
        self.prompt, self.sampled = prompt.text, ids_text(token_ids)
        end = len(self.prompt) + len(self.sampled)
        self.answers.append(_Answer(len(shown), end, len(prompt) + len(token_ids), token_ids))

    def text_to(self, answer: _Answer) -> list[bytes | memoryview]:
        """Return the ids up to and with `answer`, in parts to be joined by commas, behind an opening bracket."""
        if answer is self.answers[-1]:
            return [memoryview(self.prompt)[:-1], self.sampled]
        return [memoryview(self.prompt)[: answer.end]]

    def last_answer_in(self, messages: Sequence[Message]) -> int:
        """Return the index of the last answer that `messages` show, with more after it; -1 when they show none."""
        shared = min(self._shared(messages), len(messages) - 1)
        at = len(self.answers) - 1
        while at >= 0 and self.answers[at].messages > shared:
            at -= 1
        return at

    def _shared(self, messages: Sequence[Message]) -> int:
        known = self.messages
        count = min(len(known), len(messages))
        # At C speed, and by identity first: histories share their messages from turn to turn.
        if messages[:count] == known[:count]:
            return count
        for index in range(count):
            if not says_the_same(known[index], messages[index]):
                return index
        return count


class _Place(NamedTuple):
    """Where a request goes on."""

    branch: _Branch
    at: int
    """Index of the answer after which it does."""


class _Asked(NamedTuple):
    """What a prompt was made for, and the prompt."""

    place: _Place | None
    tools: tuple[ToolSpec, ...]
    messages: list[Message]
    prompt: JsonIds


class TokenConversation:
    """One episode's chat with a server that is given ids. Several requests may be under way at once."""

    # Changed when a request has been answered: _branches. Changed by each request: _asked, _last.
    __slots__ = ("_asked", "_branches", "_generate", "_last", "_renderer")

    def __init__(self, renderer: Renderer, generate: Generate) -> None:
        """Begin with nothing. `generate` sends a prompt of ids."""
        self._renderer, self._generate = renderer, generate
        self._branches: list[_Branch] = []
        self._asked = 0
        self._last: _Asked | None = None

    def __repr__(self) -> str:
        messages = max((len(branch.messages) for branch in self._branches), default=0)
        return f"<TokenConversation {len(self._branches)} branches, the longest {messages} messages>"

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int | None = None,
        tools: Sequence[ToolSpec] = (),
        timeout_s: float = 600.0,
        generate: Generate | None = None,
        later: list[Callable[[], None]] | None = None,
    ) -> Completion:
        """Sample one completion; what follows the last answer shown is rendered, the rest is kept.

        Cancelled: nothing of the request is remembered. Raises as `Endpoint.complete` does; EndpointRefused also when
        the model's chat format has no way to write the messages, MalformedReply when it knows no such ids.

        Args: generate: sends this one prompt in its own way, for those who want to see the ids come. later: for one
            of several draws: gets what remembers this one, to be called if it is played.
        """
        # 1. Decide what the model sees.
        shown, offered = list(messages), tuple(tools)
        place = self._longest(shown, offered)
        if place is None:
            self._asked = max(self._asked, _first_free_number(shown))
        prompt = self._prompt(place, shown, offered)
        prefix = f"call_{self._asked}"
        self._asked += 1
        # 2. Sample.
        completion = await (generate or self._generate)(prompt, sampling, seed=seed, timeout_s=timeout_s)
        if not completion.token_ids:
            return completion  # the record will say that the server gave none
        # 3. Read what it says, and remember it as it was sampled.
        completion = self._read(completion, sampling, prefix, has_tools=bool(offered))
        answer = Message("assistant", completion.text, completion.tool_calls)
        ids = completion.token_ids

        def remember() -> None:
            self._branch_at(place, offered).add(shown, answer, prompt, ids)

        if later is None:
            remember()
        else:
            later.append(remember)
        return completion

    def recall(self, chat: RecordedChat, tools: Sequence[ToolSpec] = ()) -> bool:
        """Go on from a chat of an earlier conversation, with its ids as they were; return whether that can be done.

        It cannot where the renderer would have written its beginning, or reads the answer, otherwise: the ids are then
        another model's, or another format's.
        """
        answer, offered = chat.messages[-1], tuple(tools)
        prompt, token_ids = chat.prompt_ids(), chat.answer_ids()
        try:
            head = self._renderer.render(chat.head(), offered)
            reply = self._renderer.parse(token_ids, has_tools=bool(offered))
        except ConfigError:
            return False
        # Stop strings cut the text, and the ids keep the whole last token.
        read = Message("assistant", reply.text[: len(answer.content)], reply.tool_calls)
        if prompt[: len(head)] != head or not says_the_same(read, answer):
            return False
        shown = list(chat.messages[:-1])
        whole = JsonIds(b"[%b]" % ids_text(prompt), len(prompt))
        self._branch_at(None, offered).add(shown, answer, whole, token_ids)
        self._asked = _first_free_number(chat.messages)
        return True

    def _longest(self, messages: list[Message], tools: tuple[ToolSpec, ...]) -> _Place | None:
        """Return the longest chat that `messages` go on from; tools on offer are part of what the model saw."""
        best, length = None, 0
        for branch in reversed(self._branches):
            if branch.tools != tools:
                continue
            at = branch.last_answer_in(messages)
            if at >= 0 and branch.answers[at].messages > length:
                best, length = _Place(branch, at), branch.answers[at].messages
        return best

    def _prompt(self, place: _Place | None, messages: list[Message], tools: tuple[ToolSpec, ...]) -> JsonIds:
        """Return the ids of the request; several draws from one chat, one after another, are rendered once."""
        last = self._last
        if last is not None and (last.place, last.tools, last.messages) == (place, tools, messages):
            return last.prompt
        prompt = self._rendered(place, messages, tools)
        self._last = _Asked(place, tools, list(messages), prompt)  # a copy: branches add to their list
        return prompt

    def _rendered(self, place: _Place | None, messages: list[Message], tools: tuple[ToolSpec, ...]) -> JsonIds:
        try:
            if place is None:
                whole = self._renderer.render(messages, tools)
                return JsonIds(b"[%b]" % ids_text(whole), len(whole))
            answer = place.branch.answers[place.at]
            new = self._renderer.extend(answer.token_ids, messages[answer.messages :], tools)
        except ConfigError as error:
            # As a server that renders would: this episode fails, not the run.
            raise EndpointRefused(f"chat must be one that the model's format can write: {error}") from error
        parts = place.branch.text_to(answer)
        if new:
            parts.append(ids_text(new))
        parts[-1] = b"".join((parts[-1], b"]"))  # the last part is short: the whole is copied once, by the join
        return JsonIds(b",".join(parts), answer.length + len(new))

    def _read(self, completion: Completion, sampling: Sampling, prefix: str, *, has_tools: bool) -> Completion:
        """Return the completion with text and calls as the sampled ids say, whatever the server makes of them."""
        try:
            reply = self._renderer.parse(completion.token_ids, has_tools=has_tools, call_id_prefix=prefix)
        except ConfigError as error:
            raise MalformedReply(f"sampled ids must be of the renderer's vocabulary: {error}") from error
        text, stop_reason = reply.text, completion.stop_reason
        if sampling.stop and stop_reason == "stop":
            # The ids hold the whole last token; the text ends before the stop string, as in the API.
            text = text[: min((at for stop in sampling.stop if (at := text.find(stop)) >= 0), default=len(text))]
        if reply.tool_calls and stop_reason == "stop":
            stop_reason = "tool_calls"
        return msgspec.structs.replace(completion, text=text, tool_calls=reply.tool_calls, stop_reason=stop_reason)

    def _branch_at(self, place: _Place | None, tools: tuple[ToolSpec, ...]) -> _Branch:
        """Return the branch that goes on at `place`: a new one when another answer has come there in the meantime."""
        branch = place.branch if place is not None else None
        if branch is None or place is None:
            branch = _Branch(tools, ())
        elif place.at != len(branch.answers) - 1:
            branch = _Branch(tools, branch.answers[: place.at + 1])
        elif branch in self._branches:
            self._branches.remove(branch)
        self._branches.append(branch)
        del self._branches[:-_MAX_BRANCHES]
        return branch


def _first_free_number(messages: Sequence[Message]) -> int:
    """Return a number from which on no call of a chat has its id: one that begins in the middle shows earlier calls."""
    found = (_CALL_ID.match(call.id) for message in messages for call in message.tool_calls)
    return 1 + max((int(match[1]) for match in found if match), default=-1)
