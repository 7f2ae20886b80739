"""How a server says no: OpenAI's error object, with the offending field named as precisely as it is known."""

import json
import re
from typing import TypeVar

import msgspec

__all__ = ["JSON_HEADERS", "RequestError", "decode_json", "error_body", "nested_too_deep", "refusal_headers"]

JSON_HEADERS = {"Content-Type": "application/json"}

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")

T = TypeVar("T")


class RequestError(Exception):
    """A server refuses a request; becomes an OpenAI-style error reply."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after_s = retry_after_s


def decode_json(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    """Return what `body` holds.

    Raises: RequestError: 400 with the field named in `param`, as precisely as it is known.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _as_request_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, error) from None
    except RecursionError:
        raise nested_too_deep() from None


def nested_too_deep() -> RequestError:
    """Return the reply to a request whose JSON has more levels than Python can follow."""
    return RequestError("the body must be nested less deeply: got more levels than can be read")


def error_body(error: RequestError) -> bytes:
    """Return an error as OpenAI spells it."""
    told = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    # Parts of headers may be in it, which need not be UTF-8.
    told = {name: text and text.encode(errors="backslashreplace").decode() for name, text in told.items()}
    return msgspec.json.encode({"error": told})


def refusal_headers(error: RequestError) -> dict[str, str]:
    """Return the headers of an error reply."""
    headers = dict(JSON_HEADERS)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 409:
        headers["x-should-retry"] = "false"  # OpenAI's SDKs take a conflict for something that passes
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def _as_request_error(error: msgspec.ValidationError) -> RequestError:
    text = str(error)
    path, missing = _PATH.search(text), _MISSING.search(text)
    where = path.group(1) if path else ""
    if missing:
        where = f"{where}.{missing.group(1)}" if where else missing.group(1)
    return RequestError(f"{where or 'the body'} must fit the schema: {_PATH.sub('', text)}", param=where or None)


def _malformed(body: bytes, error: Exception) -> RequestError:
    """Explain a body that is no JSON; NaN and Infinity, which many clients write, are traced to their field."""
    unreal: list[str] = []
    try:
        parsed = json.loads(body, parse_constant=lambda constant: _Unreal(constant))
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        unreal = [name for name, value in parsed.items() if isinstance(value, _Unreal)]
    if unreal:
        return RequestError(f"{unreal[0]} must be finite: JSON has no NaN or Infinity", param=unreal[0])
    return RequestError(f"the body must be valid JSON: {error}")


class _Unreal(str):
    """Stands for NaN or Infinity in a leniently parsed body."""
