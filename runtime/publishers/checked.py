"""What all publishers to servers share: retries, one deadline, and the canary at the end."""

import asyncio
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import anyio

from turngate.runtime.canary import Canary, CanaryReport, check_canary, measure_canary, read_canary
from turngate.runtime.errors import ConfigError, PublishError, PublishRefused
from turngate.runtime.weights import InFlight

__all__ = ["CheckedPublisher", "ServerControl", "canary_of"]

_EXACT_ERROR = 1e-3
"""Nats. The same weights in float32 agree to 1e-6; what agrees within this is the same weights. A tied head that stayed
behind by one small update was measured to differ by 0.009."""
_LOOSEST_ERROR = 0.2
"""Nats. The same weights in bfloat16 against float32 agree to 0.03 on average, a model far from its first policy less
well; weights an update apart may be closer than this, which is why the tolerance follows what was seen."""
_SPREAD = 5.0
"""How much larger than the first agreement a later one may be: contexts grow unlikely as the policy sharpens."""
_UNDO_S = 60.0
"""For going back after a failed check, beyond the publication's own deadline."""


class ServerControl(Protocol):
    """One kind of server, as far as changing its weights goes."""

    in_flight: InFlight

    @property
    def model(self) -> str | None:
        """The name that requests must give to get the newest version; None when it never changes."""
        ...

    async def serve(self, path: Path, policy_version: int) -> None:
        """Put weights into service, in one attempt that can be repeated.

        Cancelled: the server goes on serving, the old version or the new. Raises: PublishError, PublishRefused.
        """
        ...

    async def keep(self) -> None:
        """What was served last has proved right: forget what only going back would need."""
        ...

    async def undo(self) -> str:
        """Go back to the weights before; return what serves now, as the end of an error message."""
        ...

    async def served_version(self) -> int:
        """Ask which version is in service, 0 when none was ever published."""
        ...

    async def score(self, token_ids: Sequence[int], *, timeout_s: float = 60.0) -> list[float]:
        """Return log-probs under the weights that were put into service last."""
        ...

    async def is_exact(self) -> bool:
        """Whether agreement must be close from the first time on.

        As the server computes in float32, or as a fault that it is known for would hide in the noise of less.
        """
        ...


class CheckedPublisher:
    """Publishes through a server's control routes, and believes it only when the server answers like the new weights.

    What fails for a reason that may pass (no reply, 5xx) is tried again, with growing pauses.
    """

    # Changed by publish(): _agreement, _previous, _is_exact, is_switching.

    def __init__(
        self,
        control: ServerControl,
        *,
        timeout_s: float,
        attempts: int,
        retry_delay_s: float,
        canary_tolerance: float | Literal["auto"],
        is_tied: bool = False,
    ) -> None:
        """Wrap the control of a server.

        Args: timeout_s: of one publication, retries and check included. canary_tolerance: mean difference of log-probs
            in nats; math.inf leaves the check out. "auto" is 0.001 for a server that computes in float32, and 0.2 for
            others until the first agreement; from then on five times what that showed, within the same limits.
            is_tied: the model's head is its embedding.
        Raises: ConfigError: a limit cannot work.
        """
        if timeout_s <= 0 or attempts < 1 or retry_delay_s < 0:
            raise ConfigError(
                "publisher limits must be positive: expected timeout_s > 0, attempts >= 1, retry_delay_s >= 0, "
                f"got {timeout_s}, {attempts}, {retry_delay_s}"
            )
        if canary_tolerance != "auto" and not canary_tolerance > 0:
            raise ConfigError(f"canary_tolerance must be 'auto' or a positive number of nats: got {canary_tolerance!r}")
        self._control = control
        self._timeout_s, self._attempts, self._retry_delay_s = timeout_s, attempts, retry_delay_s
        self._tolerance = canary_tolerance
        self._is_tied = is_tied
        self._agreement: float | None = None
        self._previous: Canary | None = None
        self._is_exact: bool | None = None
        self._turn = asyncio.Lock()  # a canary tells nothing while another publication is under way
        self.is_switching = False
        """Whether a publication is under way, and with `in_flight == "restarts"` requests go unanswered."""
        self.serving_version: int | None = None
        """The version that answers already while it is being checked, and after; None while the endpoint knows better:
        before the first, after one that was taken back, and where requests name the version they want."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._control!r}>"

    @property
    def in_flight(self) -> InFlight:
        """What becomes of requests under way."""
        return self._control.in_flight

    @property
    def model(self) -> str | None:
        """The name that requests must give to get the newest version; None when it never changes."""
        return self._control.model

    @property
    def canary_tolerance(self) -> float:
        """The mean difference that is allowed now, in nats."""
        if not isinstance(self._tolerance, str):
            return self._tolerance
        if self._agreement is None:
            return _EXACT_ERROR if self._is_exact else _LOOSEST_ERROR
        return min(max(_SPREAD * self._agreement, _EXACT_ERROR), _LOOSEST_ERROR)

    async def publish(self, path: Path, policy_version: int) -> None:
        """Serve `path` as `policy_version`; returns once the server answers like these weights.

        Cancelled: either version serves; publish again to be sure.
        Raises: PublishError: the message says what serves. PublishRefused: and trying again cannot help.
        """
        path = Path(os.path.abspath(path))  # noqa: ASYNC240 - arithmetic on strings
        what = f"policy version {policy_version} ({path})"
        try:
            async with asyncio.timeout(self._timeout_s), self._turn:
                self.is_switching = True
                await self._serve(path, policy_version, what)
                # Before the check, which takes its time: what is sampled meanwhile is this version's.
                self.serving_version = policy_version if self.model is None else None
                await self._check(path, what)
        except TimeoutError:
            raise PublishError(
                f"{what} must be served within {self._timeout_s} s: got no answer ({self._control!r}); check that the "
                "server is alive; until the next publication it may be serving either version"
            ) from None
        finally:
            self.is_switching = False

    async def served_version(self) -> int:
        """Ask the server which version it serves. Raises: PublishError: it does not say."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._control.served_version()
        except TimeoutError:
            raise PublishError(f"the server must say what it serves: got no answer ({self._control!r})") from None

    async def is_serving(self, path: Path) -> bool:
        """Whether the server answers exactly like these weights already; True when they carry no canary to tell.

        Raises: PublishError: it cannot be asked.
        """
        canary = await asyncio.to_thread(canary_of, Path(path))
        if canary is None or self._tolerance == math.inf:
            return True
        report = await measure_canary(self._control, canary, timeout_s=self._timeout_s)
        if report.mean_error > _EXACT_ERROR:
            return False
        self._accept(canary, report)
        return True

    async def _serve(self, path: Path, policy_version: int, what: str) -> None:
        for attempt in itertools.count(1):
            try:
                return await self._control.serve(path, policy_version)
            except PublishRefused as refusal:
                raise PublishRefused(f"{what} must be accepted: {refusal}") from refusal
            except PublishError as error:
                if attempt == self._attempts:
                    raise PublishError(f"{what} must be accepted: {error}, {attempt} attempts") from error
            await asyncio.sleep(self._retry_delay_s * 2 ** (attempt - 1))

    async def _check(self, path: Path, what: str) -> None:
        try:
            # Read only now: what is no weights file is for the server to refuse, in its own words.
            canary = await asyncio.to_thread(canary_of, path)
            if canary is not None and self._tolerance != math.inf:
                if self._is_exact is None:
                    self._is_exact = canary.dtype == "float32" and await self._control.is_exact()
                report = await check_canary(
                    self._control,
                    canary,
                    self.canary_tolerance,
                    previous=self._previous,
                    is_tied=self._is_tied,
                    timeout_s=self._timeout_s,
                )
                self._accept(canary, report)
        except PublishError as mismatch:
            self.serving_version = None
            # Past the deadline if need be, and although cancelled: wrong weights must not stay because of a timer.
            state = "what the server serves now is not known"
            with anyio.move_on_after(_UNDO_S, shield=True):
                state = await self._control.undo()
            raise type(mismatch)(f"{what}: {mismatch}; {state}") from mismatch
        await self._control.keep()

    def _accept(self, canary: Canary, report: CanaryReport) -> None:
        self._previous = canary
        if self._agreement is None:
            self._agreement = report.mean_error


def canary_of(path: Path) -> Canary | None:
    """Return the canary of a weights file, or of the weights in a model folder; None when there is none.

    Raises: PublishError: the weights cannot be read.
    """
    if path.is_dir():
        path /= "model.safetensors"
        if not path.exists():
            return None
    elif path.exists() and not path.is_file():
        raise PublishError(f"weights must be a regular file or a folder: got neither ({path})")  # a pipe has no end
    return read_canary(path)
