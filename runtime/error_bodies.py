"""What servers say when they refuse: the message, whatever the shape of the reply."""

import msgspec

from turngate.runtime.json_ids import DECODE_ERRORS

__all__ = ["error_message"]


class _ErrorBody(msgspec.Struct):
    """The shapes servers give errors: OpenAI nests them, older vLLM is flat, FastAPI says `detail`."""

    error: object = None
    message: object = None
    detail: object = None


def error_message(body: bytes) -> str:
    """Return the message in an error reply of any common shape, or the start of whatever came instead."""
    try:
        decoded = msgspec.json.decode(body, type=_ErrorBody)
        found = decoded.error if decoded.error is not None else decoded.message or decoded.detail
        if isinstance(found, dict):
            parts = [str(found[key]) for key in ("message", "code") if found.get(key)]
            found = " | ".join(parts) or found
        text = str(found)[:500] if found else ""
    except DECODE_ERRORS:
        text = ""
    return text or body[:200].decode(errors="replace")
