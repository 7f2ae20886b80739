"""How new weights reach whatever serves them: the seam. The publishers themselves are in `turngate.runtime.publishers`.

A publisher returns when requests that start now are answered by the new weights, or raises `PublishError`. Publishing
the same version with the same weights again is allowed and changes nothing, so a lost reply can be retried.
"""

import asyncio
import logging
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from turngate.runtime.errors import ConfigError, PublishError, PublishRefused

__all__ = ["RETRY_PAUSES_S", "InFlight", "WeightPublisher", "check_in_flight", "hand_over", "move_endpoint"]

RETRY_PAUSES_S = (1.0, 5.0, 15.0)
"""Before another publication: long enough, with what a publisher tries itself, for a server that is restarted."""
_log = logging.getLogger("turngate.weights")

InFlight: TypeAlias = Literal["continues", "pauses", "restarts"]
"""What becomes of requests under way while weights change.

`continues`: they go on, their later tokens from the new weights or, where each version keeps its name, from the old.
`pauses`: they end under the old weights, and new ones wait until the change is done.
`restarts`: they are aborted and must be sent again; nothing is answered until the change is done.
"""


class WeightPublisher(Protocol):
    """Puts one set of weights into service.

    What it may have beside this: `model`, the name that requests must give to be answered by the newest version;
    `is_serving(path)`, which asks the server whether it answers like the weights in a file.
    """

    @property
    def in_flight(self) -> InFlight:
        """What becomes of requests under way."""
        ...

    async def publish(self, path: Path, policy_version: int) -> None:
        """Serve the safetensors file `path` as `policy_version`.

        Cancelled: either the old or the new version serves, never a mixture; publish again to be sure.
        Raises: PublishError: the old version still serves unless the message says otherwise. PublishRefused: and trying
            again cannot help.
        """
        ...

    async def served_version(self) -> int:
        """Return the newest version in service, 0 before the first publication. A run never goes below it."""
        ...


async def hand_over(publisher: WeightPublisher, path: Path, policy_version: int) -> None:
    """Publish, again if need be: whoever waits for it goes on with the old weights until it serves or is refused.

    Raises: PublishError: as `publish` does, after all attempts.
    """
    for pause_s in RETRY_PAUSES_S:
        try:
            await publisher.publish(path, policy_version)
            return
        except PublishRefused:
            raise
        except PublishError as error:
            _log.warning(f"{error}; publishing again in {pause_s:g} s")
        await asyncio.sleep(pause_s)
    await publisher.publish(path, policy_version)


class _Named(Protocol):
    """An endpoint as far as publishing moves it."""

    policy_version: int


def move_endpoint(endpoint: _Named, publisher: WeightPublisher, policy_version: int) -> None:
    """Let an endpoint's next requests ask for what was just published, under its version and, if it has one, its name.

    Without an await in between, so that no request is sent under one version to the weights of another.
    """
    endpoint.policy_version = policy_version
    model: str | None = getattr(publisher, "model", None)
    if model is not None:
        if not hasattr(endpoint, "model"):
            raise ConfigError(
                f"an endpoint must name the model it asks for, to be moved to {model!r}: got {endpoint!r}; publish to "
                "an Endpoint, or publish full weights"
            )
        setattr(endpoint, "model", model)  # noqa: B010 - not every endpoint has a name to move


def check_in_flight(in_flight: str, can: tuple[InFlight, ...]) -> None:
    """Require that a publisher can do what it is asked to. Raises: ConfigError."""
    if in_flight not in can:
        raise ConfigError(f"in_flight must be one of {', '.join(map(repr, can))}: got {in_flight!r}")
