"""Publishing to a folder, for servers that load what a folder says."""

import asyncio
import math
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from turngate.runtime.canary import ScoresTokens, check_canary
from turngate.runtime.errors import ConfigError, PublishError
from turngate.runtime.files import write_atomically
from turngate.runtime.json_ids import DECODE_ERRORS
from turngate.runtime.publishers.checked import canary_of
from turngate.runtime.publishers.folders import is_tied, model_folder
from turngate.runtime.weights import InFlight, check_in_flight

__all__ = ["FolderPublisher"]


class _Pointer(msgspec.Struct):
    """What `latest.json` holds."""

    policy_version: int
    file: str


class FolderPublisher:
    """Publishes to a folder: an atomic copy per version, and `latest.json` that names the newest.

    For servers that load what a folder says. A reader that opens what `latest.json` names never sees half of it.
    Files alone put nothing into service: `wait_until_served(version)` must return once the server answers with it, or
    the rollouts after it would be labelled with weights that did not produce them. An `endpoint` makes sure.
    """

    def __init__(
        self,
        folder: Path,
        *,
        wait_until_served: Callable[[int], Awaitable[object]],
        keep: int | None = None,
        base_model: Path | None = None,
        in_flight: InFlight = "pauses",
        endpoint: ScoresTokens | None = None,
        canary_tolerance: float = 0.2,
        timeout_s: float = 600.0,
    ) -> None:
        """Prepare to publish below `folder`.

        Args: keep: how many of the newest versions stay. base_model: a Hugging Face model folder: each version becomes
            a whole one, in place of a file. in_flight: what your server does to requests under way. endpoint: where the
            weights' canary is scored once they are served; `canary_tolerance` in nats, on average. timeout_s: for
            `wait_until_served` and the canary together.
        Raises: ConfigError: a setting cannot work.
        """
        if keep is not None and keep < 1:
            raise ConfigError(f"keep must be None or at least 1: got {keep}; it counts the newest versions to keep")
        if not canary_tolerance > 0:
            raise ConfigError(f"canary_tolerance must be a positive number of nats: got {canary_tolerance!r}")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive: got {timeout_s}")
        check_in_flight(in_flight, ("continues", "pauses", "restarts"))
        self.in_flight: InFlight = in_flight
        self._folder = Path(folder)
        self._keep = keep
        self._wait_until_served = wait_until_served
        self._base_model = Path(base_model) if base_model is not None else None
        self._is_tied = self._base_model is not None and is_tied(self._base_model)
        self._endpoint = endpoint
        self._canary_tolerance = canary_tolerance
        self._timeout_s = timeout_s

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
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._wait_until_served(policy_version)
                await self._check(Path(path), policy_version)
        except TimeoutError as error:
            raise PublishError(
                f"policy version {policy_version} must be served within {self._timeout_s:g} s: it was not "
                f"({self._folder}); check the server that reads it; latest.json names it; what is served is not known"
            ) from error

    async def served_version(self) -> int:
        """Return the version that `latest.json` names, 0 when there is none. Raises: PublishError: it is garbled."""
        latest = await asyncio.to_thread(self.latest)
        return latest[1] if latest is not None else 0

    async def _check(self, path: Path, policy_version: int) -> None:
        if self._endpoint is None or self._canary_tolerance == math.inf:
            return
        canary = await asyncio.to_thread(canary_of, path)
        if canary is None:
            return
        try:
            await check_canary(self._endpoint, canary, self._canary_tolerance, is_tied=self._is_tied)
        except PublishError as mismatch:
            raise type(mismatch)(
                f"policy version {policy_version}: {mismatch}; latest.json names it; what is served is not known"
            ) from mismatch

    def _publish(self, path: Path, policy_version: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        latest = self.latest()
        if latest is not None and policy_version < latest[1]:
            raise PublishError(
                f"policy versions must not go back: expected at least {latest[1]}, got {policy_version} "
                f"({self._folder}); use an empty folder for a new run"
            )
        name = f"policy-{policy_version:08d}" + ("" if self._base_model else ".safetensors")
        self._copy_whole(path, self._folder / name)
        write_atomically(self._folder / "latest.json", msgspec.json.encode(_Pointer(policy_version, name)))
        if self._keep is not None:
            for _, old in self._versions()[: -self._keep]:
                _remove(old)

    def _versions(self) -> list[tuple[int, Path]]:
        """Published files with their versions, oldest first. By number: names sort wrongly beyond eight digits."""
        suffix = "" if self._base_model else ".safetensors"
        found = self._folder.glob(f"policy-*{suffix}")
        numbered = [(p.name.removesuffix(suffix).removeprefix("policy-"), p) for p in found]
        return sorted((int(number), p) for number, p in numbered if number.isdecimal())

    def latest(self) -> tuple[Path, int] | None:
        """Return the newest weights and their version; None when nothing was published yet.

        Raises: PublishError: `latest.json` is not as we write it.
        """
        path = self._folder / "latest.json"
        try:
            pointer = msgspec.json.decode(path.read_bytes(), type=_Pointer)
        except FileNotFoundError:
            return None
        except (OSError, *DECODE_ERRORS) as error:
            raise PublishError(f"latest.json must be readable: {error} ({path}); use an empty folder") from error
        return self._folder / pointer.file, pointer.policy_version

    def _copy_whole(self, source: Path, target: Path) -> None:
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            if self._base_model is not None:
                temporary.mkdir()
                model_folder(self._base_model, source)(temporary)
                _replace_folder(temporary, target)
                return
            shutil.copyfile(source, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            _remove(temporary)


def _replace_folder(new: Path, target: Path) -> None:
    """Put a folder in place. No file system replaces one that is not empty in one step: the old one steps aside."""
    if target.exists():
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        target.rename(aside)
        new.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        new.rename(target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
