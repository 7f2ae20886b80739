"""Updates of weights in flight: one at a time, whole or not at all, between two decode steps."""

import asyncio
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch

from turngate.runtime.engine.batcher import Batcher
from turngate.runtime.engine.generation import server_error
from turngate.runtime.engine.model import CONFIG_FILE, WEIGHTS_FILE, PolicyModel
from turngate.runtime.engine.model_thread import ModelThread
from turngate.runtime.errors import ConfigError, EndpointError, PublishError
from turngate.runtime.openai_api.refusals import RequestError

__all__ = ["WeightUpdates"]


Swap: TypeAlias = Callable[[Batcher, Mapping[str, torch.Tensor], int], None]


class WeightUpdates:
    """Takes new weights of one model into service, the policy's or a critic's.

    Versions only grow; the served one may be published again as what it is.
    """

    # State.
    version: int  # of the weights that serve
    done: int  # updates that changed the weights
    failed: int  # updates refused or broken; the weights stayed

    def __init__(
        self,
        thread: ModelThread,
        model: PolicyModel,
        version: int,
        *,
        swap: Swap = Batcher.swap_weights,
        field: str = "policy_version",
    ) -> None:
        """Hold the parts; `swap` puts new weights into the batcher, `field` is what requests call the version."""
        self._thread = thread
        self._swap_in, self._field = swap, field
        self._model = model
        self._trial = copy.deepcopy(model)  # new weights prove themselves here, where a failure breaks nothing
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[int]] = set()
        self.version = version
        self.done = 0
        self.failed = 0

    async def take(self, path: Path, version: int) -> int:
        """Serve the file (or the weights in the folder) `path` from the next step on and return its version.

        Cancelled: the update runs to its end unheard, so versions and weights cannot come apart.
        Raises: RequestError: the old version keeps serving.
        """
        task = asyncio.create_task(self._take(path, version))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[int]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not complain when nobody waited for it

    async def _take(self, path: Path, version: int) -> int:
        async with self._one_at_a_time:
            try:
                return await self._swap(path, version)
            except BaseException as error:
                self.failed += 1
                if isinstance(error, PublishError):
                    raise RequestError(str(error), param="path", code="invalid_weights") from error
                if isinstance(error, EndpointError):
                    raise server_error(error) from error
                raise

    async def _swap(self, path: Path, version: int) -> int:
        if version < self.version:
            raise self._conflict(f"must not go back: expected more than {self.version}, got {version}")
        # Read whole and off the model thread; nothing that is swapped in is read from the disk again.
        state = await asyncio.to_thread(self._try, path)
        if version > self.version:
            await self._thread.call(lambda batcher: self._swap_in(batcher, state, version))
            self.version = version
            self.done += 1
        # A retry whose first reply was lost comes here.
        elif not await self._thread.call(lambda batcher: self._is_served(batcher, state)):
            raise self._conflict(f"must be new: {version} is served with other weights; publish under a new one")
        return self.version

    def _conflict(self, what: str) -> RequestError:
        return RequestError(f"{self._field} {what}", status=409, param=self._field, code=f"{self._field}_conflict")

    def _try(self, path: Path) -> dict[str, torch.Tensor]:
        """Return weights that fit the model and work. Raises: PublishError: they do not."""
        try:
            file = path / WEIGHTS_FILE if path.is_dir() else path
            if file is not path and (path / CONFIG_FILE).exists():
                self._check_config(path)
        except (OSError, ValueError) as error:  # a path that no file system knows: too long, a NUL inside
            raise PublishError(f"weights must have a path that exists: {error}") from error
        self._trial.load_weights(file)
        self._trial.check_overflow(where=str(file))
        return {name: tensor.clone() for name, tensor in self._trial.state_dict().items()}

    def _check_config(self, folder: Path) -> None:
        """Refuse a model whose tensors have these shapes and another meaning."""
        try:
            given, own = PolicyModel.read_config(folder), self._model.config
        except ConfigError as error:
            raise PublishError(str(error)) from error
        for name in ("rope_base", *(["value_kind"] if own.value_head else [])):
            if getattr(given, name) != getattr(own, name):
                raise PublishError(
                    f"weights must be of the served model's {name}: expected {getattr(own, name)}, got "
                    f"{getattr(given, name)} ({folder}); start another engine with that model"
                )

    def _is_served(self, _: Batcher, state: dict[str, torch.Tensor]) -> bool:
        own = self._model.state_dict()
        return own.keys() == state.keys() and all(_is_equal(own[name], state[name]) for name in own)


def _is_equal(served: torch.Tensor, given: torch.Tensor) -> bool:
    return served.shape == given.shape and torch.equal(served, given.to(served))
