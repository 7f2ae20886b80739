"""What a server can do, as found by asking it, and what that means for Turngate."""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import msgspec

from turngate.runtime.dialect import Dialect, TokenMode
from turngate.runtime.errors import ConfigError
from turngate.runtime.types import Sampling

if TYPE_CHECKING:
    from turngate.runtime.rendering import Renderer

__all__ = ["PROCESSED_HINT", "USES", "Capabilities", "Finding", "Use", "Verdict", "check_trainable"]

Verdict: TypeAlias = Literal["yes", "no", "unknown"]
Use: TypeAlias = Literal["evaluate", "record", "train", "guide", "publish"]
USES: dict[Use, str] = {
    "evaluate": "play episodes and collect their text",
    "record": "token ids and log-probs exactly as sampled",
    "train": "policy gradients on what was recorded",
    "guide": "several candidates per turn, of which one is played",
    "publish": "new weights into the running server",
}
"""What Turngate does with servers."""

PROCESSED_HINT = "vLLM: start it with --logprobs-mode processed_logprobs"
"""What makes log-probs follow the sampling."""


class Finding(msgspec.Struct, frozen=True):
    """One question and its answer."""

    verdict: Verdict = "unknown"
    seen: str = "not asked"
    """What was seen, in a few words."""

    @property
    def is_yes(self) -> bool:
        """Whether the server showed that it can."""
        return self.verdict == "yes"


_UNASKED = Finding()


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What one server can do with one model. Survives JSON: `msgspec.json.decode(text, type=Capabilities)`."""

    url: str
    model: str
    server: str = "unknown"
    """Which software, with its version where it says."""
    max_context: int | None = None
    """Tokens of prompt and completion, where the server says."""
    requests: int = 0
    """Questions that the probe asked."""

    models: Finding = _UNASKED
    """GET /models lists the model."""
    chat: Finding = _UNASKED
    """/chat/completions answers."""
    completions: Finding = _UNASKED
    """/completions answers."""
    prompt_ids: Finding = _UNASKED
    """Chat replies have the ids of the rendered prompt (`return_token_ids`)."""
    sampled_ids: Finding = _UNASKED
    """Chat replies have the sampled ids (`return_token_ids`)."""
    id_prompts: Finding = _UNASKED
    """/completions takes token ids as its prompt."""
    completion_ids: Finding = _UNASKED
    """/completions returns the sampled ids (`return_token_ids`)."""
    id_strings: Finding = _UNASKED
    """Log-probs name their tokens `token_id:123` when asked to (`return_tokens_as_token_ids`)."""
    logprobs: Finding = _UNASKED
    """Chat replies have the log-prob of every sampled token."""
    plain_logprobs: Finding = _UNASKED
    """They come without asking for alternatives (`top_logprobs`)."""
    completion_logprobs: Finding = _UNASKED
    """/completions gives the log-prob of every sampled token."""
    follows_temperature: Finding = _UNASKED
    """Log-probs are of the distribution after temperature, from which tokens were drawn."""
    follows_truncation: Finding = _UNASKED
    """The same after top_k and top_p."""
    prompt_logprobs: Finding = _UNASKED
    """/completions scores its prompt (`echo` with log-probs): canaries need it."""
    top_k: Finding = _UNASKED
    """`top_k` has its effect."""
    n: Finding = _UNASKED
    """`n` choices come when asked for."""
    seeds: Finding = _UNASKED
    """Equal seeds give equal tokens, others others."""
    streaming: Finding = _UNASKED
    """Well-formed server-sent events with the same text."""
    stream_ids: Finding = _UNASKED
    """Chunks of a stream have the sampled ids."""
    tools: Finding = _UNASKED
    """Chat requests may offer tools."""
    tool_calls: Finding = _UNASKED
    """The model's calls come back parsed."""
    stop: Finding = _UNASKED
    """Stop strings end the text where they begin."""
    stop_ids: Finding = _UNASKED
    """At a stop string the ids keep the whole last token, though the text is cut within it."""
    prefix_cache: Finding = _UNASKED
    """A prompt's known beginning is not computed again."""
    weights: Finding = _UNASKED
    """Routes that take new weights; none was called."""
    versions: Finding = _UNASKED
    """Replies say which policy version sampled each token."""
    weight_routes: tuple[str, ...] = ()
    value_version: int | None = None
    """Of the critic by whose values the server can draw tokens, where it says so: the embedded engine does."""

    def __str__(self) -> str:
        return self.table()

    def token_mode(self, *, has_renderer: bool = False) -> TokenMode:
        """Return the best source of token ids: our renderer where there is one, else the server's, else none."""
        returns_ids = self.completion_ids.is_yes or self.id_strings.is_yes
        if has_renderer and self.id_prompts.is_yes and returns_ids:
            return "tokens"
        return "server" if self.chat.is_yes and self.prompt_ids.is_yes and self.sampled_ids.is_yes else "text"

    def dialect(self, renderer: "Renderer | None" = None) -> Dialect:
        """Return how to ask this server for as much of the record as it can give."""
        mode = self.token_mode(has_renderer=renderer is not None)
        # Strings where there is a choice: return_token_ids sends the whole prompt back with every reply.
        by_strings = mode == "tokens" and self.id_strings.is_yes
        logprobs = self._logprobs_of(mode)
        needs_top = mode != "tokens" and self.plain_logprobs.verdict == "no"
        return Dialect(
            token_mode=mode,
            logprobs=logprobs.is_yes,
            top_logprobs=1 if logprobs.is_yes and needs_top else None,
            return_token_ids=mode != "text" and not by_strings,
            token_id_strings=by_strings,
            top_k=self.top_k.is_yes,
            seed=self.seeds.verdict != "no",
            guidance=self.value_version is not None,
        )

    def problems(self, use: Use, sampling: Sampling | None = None, *, has_renderer: bool = True) -> list[str]:
        """Return why a use will not work, each with what to do; empty when it will.

        Args: sampling: how completions will be drawn; None stands for any way. has_renderer: whether we can render
            this model's chats ourselves.
        Raises: ConfigError: there is no such use.
        """
        if use not in USES:
            raise ConfigError(f"use must be one of {', '.join(USES)}: got {use!r}")
        mode = self.token_mode(has_renderer=has_renderer)
        if use == "publish":
            return self._publish_problems()
        found = self._answer_problems(mode)
        if use in ("record", "train") and not found:
            found += self._record_problems(mode)
        if use == "train" and not found:
            found += self._distribution_problems(sampling)
        return found

    def _logprobs_of(self, mode: TokenMode) -> Finding:
        return self.completion_logprobs if mode == "tokens" else self.logprobs

    def table(self) -> str:
        """Return it for people: each capability with what was seen, then what will work in Turngate."""
        from turngate.runtime.capability_table import render_table  # late: it reads this module

        return render_table(cast(Any, self))  # to a type checker this file has two names, and two classes

    def _answer_problems(self, mode: TokenMode) -> list[str]:
        if self.chat.is_yes or mode == "tokens":
            return []
        return [f"/chat/completions must answer: {self.chat.seen}"]

    def _record_problems(self, mode: TokenMode) -> list[str]:
        found: list[str] = []
        if mode == "text":
            found.append(
                f"token ids must come back: {self.sampled_ids.seen}; use a server that knows return_token_ids, as vLLM "
                "and the embedded engine do"
            )
        logprobs = self._logprobs_of(mode)
        if not logprobs.is_yes:
            found.append(f"log-probs of sampled tokens must come back: {logprobs.seen}")
        return found

    def _distribution_problems(self, sampling: Sampling | None) -> list[str]:
        found: list[str] = []
        if (sampling is None or sampling.temperature not in (0.0, 1.0)) and not self.follows_temperature.is_yes:
            found.append(
                f"log-probs must follow the temperature, or it must stay 1: {self.follows_temperature.seen}; "
                f"{PROCESSED_HINT}, or sample at temperature 1"
            )
        truncates = sampling is None or sampling.top_p < 1 or sampling.top_k > 0
        if truncates and not self.follows_truncation.is_yes:
            found.append(
                f"log-probs must follow top_p and top_k, or neither be used: {self.follows_truncation.seen}; "
                f"{PROCESSED_HINT}, or sample with top_p=1 and top_k=0"
            )
        if not self.top_k.is_yes and (sampling is None or sampling.top_k > 0):
            found.append(f"top_k must have its effect, or stay 0: {self.top_k.seen}")
        return found

    def _publish_problems(self) -> list[str]:
        if self.weights.is_yes:
            return []
        return [
            f"a route must take new weights: {self.weights.seen}; start vLLM with VLLM_SERVER_DEV_MODE=1 for full "
            "weights, or with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for adapters; for other software "
            "use FolderPublisher, and load what it writes"
        ]


def check_trainable(endpoint: object, sampling: Sampling) -> None:
    """Refuse to train against an endpoint that is known to be unable to.

    Endpoints of which nothing is known pass: their first episodes will tell.
    Raises: ConfigError: with all reasons.
    """
    dialect, capabilities = getattr(endpoint, "dialect", None), getattr(endpoint, "capabilities", None)
    problems: list[str] = []
    if isinstance(dialect, Dialect) and dialect.token_mode == "text":
        problems.append("the endpoint's token mode is 'text': replies have no token ids, so there is nothing to train")
    if isinstance(dialect, Dialect) and not dialect.logprobs:
        problems.append("the endpoint asks for no log-probs: ratios need those of the policy that sampled")
    if isinstance(capabilities, Capabilities):
        has_renderer = isinstance(dialect, Dialect) and dialect.token_mode == "tokens"
        problems += capabilities.problems("train", sampling, has_renderer=has_renderer)
    if problems:
        raise ConfigError("training must be possible on this server: " + "; ".join(dict.fromkeys(problems)))
