"""How to ask a server for what the record needs: who renders the chat, and which fields the server knows."""

from typing import Literal, TypeAlias, get_args

import msgspec

from turngate.runtime.errors import ConfigError

__all__ = ["OPENAI", "TOKEN_MODES", "Dialect", "TokenMode"]

TokenMode: TypeAlias = Literal["tokens", "server", "text"]
"""Where token ids come from. `tokens`: we render the chat and send ids, so that what was sampled is never tokenised
again. `server`: the server renders the chat and returns ids. `text`: there are none; episodes can be evaluated and
collected, not trained on."""

TOKEN_MODES: tuple[TokenMode, ...] = get_args(TokenMode)


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What a server understands. The defaults fit the embedded engine and vLLM; `connect` finds it out by asking.

    Raises: ConfigError: the fields contradict each other.
    """

    token_mode: TokenMode = "server"
    logprobs: bool = True
    """Log-probs are asked for."""
    top_logprobs: int | None = None
    """Alternatives asked for with them: some servers give no log-probs without any."""
    return_token_ids: bool = True
    """`return_token_ids` is known: the reply has the prompt's ids and the sampled ids."""
    token_id_strings: bool = False
    """Sampled ids come as `token_id:123` in place of the log-probs' tokens (`return_tokens_as_token_ids`), for servers
    that return ids in no other way."""
    top_k: bool = True
    """`top_k` is known."""
    seed: bool = True
    """`seed` is known."""
    stop_token_ids: bool = True
    """`stop_token_ids` is known; with token_mode='tokens' alone, and only where the model's settings may lack them."""

    guidance: bool = False
    """`guidance` is known: the server draws tokens by the values of a critic. The embedded engine's is."""

    @property
    def asks_ids(self) -> bool:
        """Whether `return_token_ids` is sent. Id strings do without where the prompt is ours: servers that know both
        would send back all of it."""
        if self.token_mode == "tokens" and self.token_id_strings:
            return False
        return self.return_token_ids and self.token_mode != "text"

    def __post_init__(self) -> None:
        if self.token_mode not in TOKEN_MODES:
            raise ConfigError(f"token_mode must be one of {', '.join(TOKEN_MODES)}: got {self.token_mode!r} (Dialect)")
        if self.top_logprobs is not None and not self.logprobs:
            raise ConfigError("top_logprobs must come with logprobs: got logprobs=False (Dialect)")
        gives_ids = self.return_token_ids or self.token_id_strings
        if self.token_mode != "text" and not gives_ids:
            raise ConfigError(
                f"token_mode {self.token_mode!r} needs ids of what was sampled: expected return_token_ids or "
                "token_id_strings, got neither (Dialect); a server without ids is token_mode='text'"
            )
        if self.token_mode == "server" and not self.return_token_ids:
            raise ConfigError(
                "token_mode 'server' needs the prompt's ids: expected return_token_ids (Dialect); with id strings "
                "alone render the chat yourself: token_mode='tokens'"
            )


OPENAI = Dialect(token_mode="text", top_k=False, stop_token_ids=False)
"""The OpenAI API and nothing else, for servers that refuse fields they do not know."""
