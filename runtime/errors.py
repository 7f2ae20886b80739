"""Everything Turngate raises, by the boundary the error crossed.

TurngateError
├── ConfigError     (ValueError)    what the user asked for cannot work
├── EndpointError   (RuntimeError)  the inference server failed or answered nonsense
│   ├── EndpointTimeout (TimeoutError)
│   ├── EndpointRefused             the server said no (4xx): retrying cannot help
│   │   └── ContextOverflow         because the prompt is longer than the model's context
│   └── MalformedReply              the server answered, but not with what was asked for
│       └── GenerationAborted       but gave up half-way: sending it again can help
├── EnvError        (RuntimeError)  the environment raised or hung
├── ToolError       (RuntimeError)  a tool raised or hung
├── GuidanceError   (ValueError)    values of actions from which nothing can be chosen
├── SessionError    (RuntimeError)  a session takes no more requests
│   ├── SessionSealed               its episode is over
│   └── SessionLimit                its episode has reached a limit; it can still be given rewards
├── LearnerError    (RuntimeError)  the learner failed or its process died
├── PublishError    (RuntimeError)  new weights did not reach the server; the message says what serves now
│   └── PublishRefused              publishing them again cannot help
├── RecordError     (ValueError)    a record contradicts itself
└── StalenessError  (RuntimeError)  a token older than the bound reached a batch: a bug, never data
"""

__all__ = [
    "ConfigError",
    "ContextOverflow",
    "EndpointError",
    "EndpointRefused",
    "EndpointTimeout",
    "EnvError",
    "GenerationAborted",
    "GuidanceError",
    "LearnerError",
    "MalformedReply",
    "PublishError",
    "PublishRefused",
    "RecordError",
    "SessionError",
    "SessionLimit",
    "SessionSealed",
    "StalenessError",
    "ToolError",
    "TurngateError",
    "check_kind",
]


class TurngateError(Exception):
    """Base of every error Turngate raises on purpose."""


class ConfigError(TurngateError, ValueError):
    """What the user asked for cannot work; the message says what would."""


def check_kind(name: str, value: object, kind: type, where: str = "") -> None:
    """Require what the user gave for `name` to be a `kind`, or None. Raises: ConfigError: it is something else."""
    if value is not None and not isinstance(value, kind):
        at = f" ({where})" if where else ""
        raise ConfigError(f"{name} must be {kind.__name__}(...) or None: got {value!r:.80}{at}")


class EndpointError(TurngateError, RuntimeError):
    """The inference server failed, after the retries that could help."""

    def __init__(self, message: str = "", *, status: int = 0, told: str = "", retry_after_s: float = 0.0) -> None:
        """Say what failed.

        Args: status: of the server's last reply, 0 when there was none. told: what the server itself said, without
            where it is. retry_after_s: how long it asked us to wait.
        """
        super().__init__(message)
        self.status = status
        self.told = told
        self.retry_after_s = retry_after_s


class EndpointTimeout(EndpointError, TimeoutError):
    """The inference server did not answer within its deadline."""


class EndpointRefused(EndpointError):
    """The inference server refused the request (4xx); sending it again cannot help."""


class ContextOverflow(EndpointRefused):
    """The prompt, with room for the completion, is longer than the server's context."""


class MalformedReply(EndpointError):
    """The inference server answered, but the reply lacks or garbles what was asked for."""


class GenerationAborted(MalformedReply):
    """The inference server gave a generation up, as some do when their weights change; it can be sent again."""


class EnvError(TurngateError, RuntimeError):
    """The environment raised, hung, or broke its contract."""


class ToolError(TurngateError, RuntimeError):
    """A tool raised or hung."""


class GuidanceError(TurngateError, ValueError):
    """Values of actions from which nothing can be chosen: NaN, infinite, or all forbidden."""


class SessionError(TurngateError, RuntimeError):
    """A session takes no more requests; the message says why."""


class SessionSealed(SessionError):
    """The session's episode is over: it takes neither requests nor rewards."""


class SessionLimit(SessionError):
    """The session's episode has reached a limit: it takes no more requests, but rewards until it is sealed."""


class LearnerError(TurngateError, RuntimeError):
    """The learner failed, or the process that runs it died."""


class PublishError(TurngateError, RuntimeError):
    """New weights did not reach the server; the old version still serves unless the message says otherwise."""


class PublishRefused(PublishError):
    """The server will not take these weights, or does not answer like them; publishing them again cannot help."""


class RecordError(TurngateError, ValueError):
    """A trajectory contradicts itself: lengths, versions, or log-probs do not fit together."""


class StalenessError(TurngateError, RuntimeError):
    """A token older than the bound was about to be consumed. A bug: please report it with the message."""
