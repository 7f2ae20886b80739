"""Who we are to a server, by a key or by its URL: used to connect, and shown to nobody."""

from collections.abc import Sequence

from yarl import URL

from turngate.runtime.errors import ConfigError

__all__ = ["credentials", "scrub", "shown_url"]


def shown_url(url: str) -> str:
    """Return a URL as it may stand in messages and records: without a name and password, and without a last slash."""
    found = url.rstrip("/")
    return str(URL(found).with_user(None)) if _url_secrets(url) else found


def credentials(url: str, api_key: str | None) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return (headers that say who we are, what of that must not be shown).

    Raises: ConfigError: the URL is none, or has a name and password, which say it too.
    """
    secrets = _url_secrets(url)
    if not api_key:
        return {}, secrets
    if secrets:
        raise ConfigError("api_key must not come with a name and password in the URL: expected one of them")
    return {"Authorization": f"Bearer {api_key}"}, (api_key,)


def scrub(text: str, secrets: Sequence[str]) -> str:
    """Return a text without the secrets that a server may have put into it."""
    for secret in secrets:
        text = text.replace(secret, "[hidden]")
    return text


def _url_secrets(url: str) -> tuple[str, ...]:
    """Return the password that a URL carries, as written and decoded, and the name with it."""
    try:
        found = URL(url)
    except ValueError as error:  # the URL itself is not told: where its password would be, nobody can say
        raise ConfigError(f"url must be http(s)://host[:port]/path: {error}") from None
    parts = (found.raw_password, found.password, f"{found.raw_user}:{found.raw_password}" if found.raw_password else "")
    return tuple(part for part in parts if part)
