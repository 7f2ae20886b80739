"""How new weights reach whatever serves them.

A publisher returns when requests that start now are answered by the new weights, or raises `PublishError` with the
old version still serving. Publishing the same version with the same weights again is allowed and changes nothing, so
a lost reply can be retried.
"""

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from turngate.runtime.errors import ConfigError, PublishError
from turngate.runtime.files import write_atomically
from turngate.runtime.json_ids import DECODE_ERRORS

__all__ = ["EnginePublisher", "FolderPublisher", "WeightPublisher"]


class WeightPublisher(Protocol):
    """Puts one set of weights into service."""

    async def publish(self, path: Path, policy_version: int) -> None:
        """Serve the safetensors file `path` as `policy_version`.

        Cancelled: either the old or the new version serves, never a mixture; publish again to be sure.
        Raises: PublishError: the old version is still serving.
        """
        ...

    async def served_version(self) -> int:
        """Return the newest version in service, 0 before the first publication. A run never goes below it."""
        ...


class _Health(msgspec.Struct):
    policy_version: int


class EnginePublisher:
    """Publishes to an embedded engine: POST /admin/weights with the path of the file.

    The engine must see the same file system. Connection failures and 5xx replies are retried until `timeout_s`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        attempts: int = 4,
        retry_delay_s: float = 0.1,
    ) -> None:
        if timeout_s <= 0 or attempts < 1 or retry_delay_s < 0:
            raise ConfigError(
                "publisher limits must be positive: expected timeout_s > 0, attempts >= 1, retry_delay_s >= 0, "
                f"got {timeout_s}, {attempts}, {retry_delay_s}"
            )
        self._url = url.rstrip("/").removesuffix("/v1") + "/admin/weights"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._retry_delay_s = retry_delay_s

    def __repr__(self) -> str:
        return f"<EnginePublisher {self._url}>"

    async def publish(self, path: Path, policy_version: int) -> None:
        """Serve `path` as `policy_version`; returns once the engine says that it does."""
        absolute = os.path.abspath(path)  # noqa: ASYNC240 - arithmetic on strings
        body = {"path": absolute, "policy_version": policy_version}
        what = f"policy version {policy_version} ({path})"
        try:
            async with asyncio.timeout(self._timeout_s), aiohttp.ClientSession(headers=self._headers) as session:
                await self._post(session, body, what)
        except TimeoutError:
            raise PublishError(
                f"{what} must be served within {self._timeout_s} s: got no answer ({self._url}); "
                "check that the engine is alive"
            ) from None

    async def served_version(self) -> int:
        """Ask the engine which version it serves. Raises: PublishError: it does not say."""
        url = self._url.removesuffix("/admin/weights") + "/health"
        try:
            async with asyncio.timeout(self._timeout_s), aiohttp.ClientSession(headers=self._headers) as session:
                async with session.get(url) as reply:
                    return msgspec.json.decode(await reply.read(), type=_Health).policy_version
        except (aiohttp.ClientError, TimeoutError, OSError, *DECODE_ERRORS) as error:
            raise PublishError(f"the engine must say what it serves: got {error!r} ({url})") from error

    async def _post(self, session: aiohttp.ClientSession, body: dict[str, Any], what: str) -> None:
        failure = ""
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self._retry_delay_s * 2 ** (attempt - 1))
            try:
                # An HTTP proxy or a server in trouble may redirect; weights must not be "published" to a login page.
                async with session.post(self._url, json=body, allow_redirects=False) as reply:
                    text = await reply.text(errors="replace")
                    status = reply.status
            except (aiohttp.ClientError, OSError) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                _check_published(text, body["policy_version"], what)
                return
            failure = f"status {status}: {_error_message(text)}"
            if status < 500:
                break
        raise PublishError(f"{what} must be accepted by {self._url}: got {failure}; the old version keeps serving")


class FolderPublisher:
    """Publishes to a folder: an atomic copy per version, and `latest.json` that names the newest.

    For servers that load what a folder says. A reader that opens what `latest.json` names never sees half a file.
    Files alone put nothing into service: `wait_until_served(version)` must return once the server answers with it, or
    the rollouts after it would be labelled with weights that did not produce them.
    """

    def __init__(
        self, folder: Path, *, wait_until_served: Callable[[int], Awaitable[object]], keep: int | None = None
    ) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep must be None or at least 1: got {keep}; it counts the newest versions to keep")
        self._folder = Path(folder)
        self._keep = keep
        self._wait_until_served = wait_until_served

    def __repr__(self) -> str:
        return f"<FolderPublisher {self._folder}>"

    async def publish(self, path: Path, policy_version: int) -> None:
        """Copy `path` into the folder, point `latest.json` at the copy, and wait until it is served."""
        try:
            await asyncio.to_thread(self._publish, Path(path), policy_version)
        except OSError as error:
            raise PublishError(
                f"policy version {policy_version} must be copied to {self._folder}: got {error}; "
                "latest.json still names the old version"
            ) from error
        await self._wait_until_served(policy_version)

    async def served_version(self) -> int:
        """Return the version that `latest.json` names, 0 when there is none."""
        latest = await asyncio.to_thread(self.latest)
        return latest[1] if latest is not None else 0

    def _publish(self, path: Path, policy_version: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        latest = self.latest()
        if latest is not None and policy_version < latest[1]:
            raise PublishError(
                f"policy versions must not go back: expected at least {latest[1]}, got {policy_version} "
                f"({self._folder}); use an empty folder for a new run"
            )
        name = f"policy-{policy_version:08d}.safetensors"
        _copy_whole(path, self._folder / name)
        pointer = json.dumps({"policy_version": policy_version, "file": name}).encode()
        write_atomically(self._folder / "latest.json", pointer)
        if self._keep is not None:
            for _, old in self._versions()[: -self._keep]:
                old.unlink(missing_ok=True)

    def _versions(self) -> list[tuple[int, Path]]:
        """Published files with their versions, oldest first. By number: names sort wrongly beyond eight digits."""
        numbered = [(p.stem.removeprefix("policy-"), p) for p in self._folder.glob("policy-*.safetensors")]
        return sorted((int(number), p) for number, p in numbered if number.isdecimal())

    def latest(self) -> tuple[Path, int] | None:
        """Return the newest weights and their version; None when nothing was published yet."""
        try:
            pointer = json.loads((self._folder / "latest.json").read_bytes())
        except FileNotFoundError:
            return None
        return self._folder / pointer["file"], int(pointer["policy_version"])


def _check_published(text: str, policy_version: int, what: str) -> None:
    """A 200 alone proves little: servers have answered 200 and kept the old weights."""
    try:
        served = msgspec.json.decode(text, type=dict[str, Any]).get("policy_version")
    except DECODE_ERRORS:
        served = None
    if served != policy_version:
        raise PublishError(f"{what} must be confirmed by the engine: got {text[:200]!r}; is this a Turngate engine?")


def _error_message(text: str) -> str:
    """The message of an OpenAI-style error reply, or the start of whatever came instead."""
    try:
        return str(msgspec.json.decode(text, type=dict[str, dict[str, Any]])["error"]["message"])
    except (*DECODE_ERRORS, KeyError):
        return text[:200]


def _copy_whole(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
