"""The guided policy as a service: which requests are guided, and how, by the model's name, a header, or their session.

model="base@guided"                               as the gateway is set up
x-turngate-guidance: beta=5, draws=8              other settings, within the gateway's maxima
x-turngate-guidance: tokens, beta=5, top_k=8      token by token, on a server that can
x-turngate-guidance: off                          the base policy
"""

import math
from typing import NamedTuple

from turngate.runtime.conversation import token_mode_of
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.errors import ConfigError
from turngate.runtime.gateway.config import GatewayConfig
from turngate.runtime.gateway.keys import is_guided
from turngate.runtime.guidance import Guidance
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.session import Session
from turngate.runtime.types import TokenGuidance

__all__ = ["GUIDANCE_HEADER", "UNGUIDED", "Steered", "Steering"]

GUIDANCE_HEADER = "x-turngate-guidance"
_ACTIONS = ("beta", "draws", "floor", "max_kl")
_TOKENS = ("beta", "top_k", "tail")
_MAX_DIGITS = 10
"""Of a whole number: beyond it nothing is within bounds, and Python refuses to read thousands."""


class Steered(NamedTuple):
    """How one reply is guided."""

    actions: Guidance | None = None
    """Chooses among whole replies."""
    tokens: TokenGuidance | None = None
    """Is asked of the server."""
    is_asked: bool = False
    """Whether the request itself asks for guidance, and not its session."""


UNGUIDED = Steered()


class Steering:
    """Decides for each request; one per gateway."""

    def __init__(self, endpoint: ChatEndpoint, guidance: Guidance | None, config: GatewayConfig) -> None:
        """Args: guidance: what `base@guided` stands for; None offers none."""
        self._endpoint, self.guidance, self._config = endpoint, guidance, config

    def __repr__(self) -> str:
        return f"<Steering {self.guidance!r}>"

    def of(self, session: Session, model: str | None, header: str) -> Steered:
        """Return how a request is guided. Raises: RequestError: 400, naming the field that cannot be."""
        words, settings = _parsed(header)
        if words == ["off"]:
            if settings:
                raise _bad("off", "must stand alone")
            return UNGUIDED
        if words == ["tokens"]:
            return Steered(tokens=self._tokens(settings), is_asked=True)
        if words:
            raise _bad(words[0], "is unknown: expected off, tokens, or settings such as beta=5, draws=8")
        is_asked = bool(header.strip()) or is_guided(model)
        guidance = self._actions(session, settings) if is_asked else session.guidance
        if guidance is None:
            return UNGUIDED
        self._check(guidance)
        try:
            is_base = guidance.candidates is None and guidance.beta_at(self._endpoint.policy_version) == 0
        except ConfigError as error:  # the gateway's own schedule gives none
            raise RequestError(str(error), code="guidance_unavailable") from error
        # Beta 0 takes the way of the base itself, bit for bit.
        return UNGUIDED if is_base else Steered(guidance, is_asked=is_asked)

    def _actions(self, session: Session, settings: dict[str, str]) -> Guidance:
        guidance = self.guidance or session.guidance
        if guidance is None:
            raise RequestError(
                "guidance must be set up on the gateway: this one has none; start it with --guided-by or --judge, or "
                "give it a Guidance",
                param="model" if not settings else GUIDANCE_HEADER,
                code="guidance_unavailable",
            )
        config = self._config
        most = {"beta": config.max_guidance_beta, "draws": config.max_guidance_draws, "floor": 1.0, "max_kl": math.inf}
        _check_names(settings, _ACTIONS)
        found = {name: _number(name, text, most[name]) for name, text in settings.items() if name != "draws"}
        draws = _whole("draws", settings["draws"], config.max_guidance_draws) if "draws" in settings else None
        try:
            return guidance.variant(draws=draws, **found)
        except ConfigError as error:
            raise RequestError(str(error), param=GUIDANCE_HEADER) from None

    def _tokens(self, settings: dict[str, str]) -> TokenGuidance:
        dialect = getattr(self._endpoint, "dialect", None)
        if not getattr(dialect, "guidance", False):
            raise RequestError(
                "guidance of tokens needs a server that draws tokens by values: this gateway's is not known to; the "
                "embedded engine with a critic is one. Guide whole replies instead: beta=5, draws=8",
                param=GUIDANCE_HEADER,
                code="guidance_unavailable",
            )
        _check_names(settings, _TOKENS)
        if "beta" not in settings:
            raise _bad("beta", "must be given with tokens")
        beta = _number("beta", settings["beta"], self._config.max_guidance_beta)
        top_k = _whole("top_k", settings.get("top_k", "8"), self._config.max_guidance_draws)
        tail = settings.get("tail", "base")
        if tail not in ("base", "zero"):
            raise _bad("tail", f"must be base or zero: got {tail!r:.40}")
        return TokenGuidance(beta=beta, top_k=top_k, tail="base" if tail == "base" else "zero")

    def _check(self, guidance: Guidance) -> None:
        mode = token_mode_of(self._endpoint)
        if mode == "text" and getattr(guidance.q, "needs_token_ids", False):
            raise RequestError(
                f"values of {guidance.name} are read from token ids, which this gateway's server does not give (token "
                "mode 'text'); use a value function that reads text, such as a judge",
                param=GUIDANCE_HEADER,
                code="guidance_unavailable",
            )
        if mode in ("text", "server") and guidance.candidates is not None:
            raise RequestError(
                f"listed actions must be put into a chat that is rendered here: this gateway's is not (token mode "
                f"{mode!r}); guide draws instead",
                param=GUIDANCE_HEADER,
                code="guidance_unavailable",
            )


def _parsed(header: str) -> tuple[list[str], dict[str, str]]:
    """Return the words and the settings of a header."""
    words: list[str] = []
    settings: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in header.split(","))):
        name, found, value = part.partition("=")
        name = name.strip()
        if not found:
            words.append(name)
        elif name in settings:
            raise _bad(name, "must be given once")
        else:
            settings[name] = value.strip()
    return words, settings


def _check_names(settings: dict[str, str], known: tuple[str, ...]) -> None:
    for name in settings:
        if name not in known:
            raise _bad(name, f"is unknown: expected one of {', '.join(known)}")


def _number(name: str, text: str, most: float) -> float:
    try:
        # Python's own spellings, 1_0 and digits of other scripts, are no numbers to anybody else.
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not 0 <= value <= most or value == math.inf:
        raise _bad(name, f"must be a number from 0 to {most:g}: got {text!r:.40}")
    return value


def _whole(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS and 1 <= int(text) <= most):
        raise _bad(name, f"must be a whole number from 1 to {most}: got {text!r:.40}")
    return int(text)


def _bad(name: str, why: str) -> RequestError:
    return RequestError(f"{name[:40]} {why} ({GUIDANCE_HEADER})", param=f"{GUIDANCE_HEADER}.{name[:40]}")
