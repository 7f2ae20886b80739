"""What a server's URL says of who we are: used to connect, and shown to nobody."""

from yarl import URL

__all__ = ["shown_url", "url_secrets"]


def shown_url(url: str) -> str:
    """Return a URL as it may stand in messages and records: without a name and password, and without a last slash."""
    found = url.rstrip("/")
    return str(URL(found).with_user(None)) if url_secrets(url) else found


def url_secrets(url: str) -> tuple[str, ...]:
    """Return the password that a URL carries, as written and decoded, and the name with it."""
    found = URL(url)
    parts = (found.raw_password, found.password, f"{found.raw_user}:{found.raw_password}" if found.raw_password else "")
    return tuple(part for part in parts if part)
