"""Who asks: which session a request belongs to, and as which agent of its episode."""

import hmac
import re
from typing import NamedTuple

from aiohttp import web

from turngate.runtime.openai_api.refusals import RequestError

__all__ = ["GUIDED", "Claim", "bearer", "check_role", "claim_of", "is_guided", "is_name", "is_same_key", "role_in"]

SESSION_HEADER = "x-turngate-session"
ROLE_HEADER = "x-turngate-role"
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
GUIDED = "guided"
"""`base@guided` is the guided policy; the word is no role."""
_MAX_KEY = 512
"""Characters of a key; longer ones are an attack or a mistake."""


class Claim(NamedTuple):
    """What a request says of itself; nothing of it is checked yet."""

    key: str
    role: str
    """Of the header alone: keys and models name roles too, after them."""


def claim_of(http: web.Request) -> Claim:
    """Return the key by which a request claims a session: of its path, its header, or as a bearer."""
    key = http.match_info.get("key") or http.headers.get(SESSION_HEADER) or bearer(http)
    return Claim(key[:_MAX_KEY], check_role(http.headers.get(ROLE_HEADER, ""), ROLE_HEADER))


def bearer(http: web.Request) -> str:
    """Return the key in the Authorization header; empty when there is none."""
    given = http.headers.get("Authorization", "")
    scheme, _, key = given.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def is_same_key(given: str, key: str) -> bool:
    """Compare keys, taking as long whatever the first wrong byte is."""
    return hmac.compare_digest(given.encode(errors="replace"), key.encode(errors="replace"))


def role_in(model: str | None) -> str:
    """Return the role in a model's name, `base@role` or `base@role@guided`; empty when there is none.

    Raises: RequestError: a bad one.
    """
    name = (model or "").removesuffix(f"@{GUIDED}")
    _, found, role = name.rpartition("@")
    if f"@{GUIDED}@" in name:  # it would be left out in silence
        raise RequestError(f"@{GUIDED} must come last in a model's name: got {model!r:.80}", param="model")
    return check_role(role, "model") if found else ""


def is_guided(model: str | None) -> bool:
    """Whether a model's name asks for the guided policy."""
    return (model or "").endswith(f"@{GUIDED}")


def is_name(name: str) -> bool:
    """Whether words behind a key can name its episode in the record: as roles, they are short and plain."""
    return _ROLE.fullmatch(name) is not None


def check_role(role: str, where: str) -> str:
    """Return the role. Raises: RequestError: it is none."""
    if role and not _ROLE.fullmatch(role):
        raise RequestError(
            f"roles must be 1 to 64 letters, digits, dots, dashes and underscores: got {role!r:.80} ({where})",
            param=where,
        )
    if role == GUIDED:
        raise RequestError(
            f"roles must not be {GUIDED!r}: the word asks for the guided policy ({where}); take another", param=where
        )
    return role
