"""One HTTP request's sequences on their way through the model thread."""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType

from turngate.runtime.engine.model_thread import ModelThread, Outcome
from turngate.runtime.engine.request import Finished, Progress, Rejection, Request
from turngate.runtime.errors import EndpointError
from turngate.runtime.openai_api.refusals import RequestError

__all__ = ["Generation", "choice_seed"]

_RETRY_AFTER_S = 1


class Generation:
    """Submits requests on entry, cancels what is unfinished on exit: leaving the block frees every slot."""

    # State.
    _outcomes: "deque[tuple[int, Outcome]]"  # heard and not yet read, with the index of the request
    _unfinished: dict[int, int]  # index of the request -> its ticket

    def __init__(self, thread: ModelThread, requests: Sequence[Request]) -> None:
        self._thread = thread
        self._requests = requests
        self._outcomes = deque()
        self._unfinished = {}
        self._wake: asyncio.Future[None] | None = None

    def __enter__(self) -> "Generation":
        try:
            for index, request in enumerate(self._requests):
                self._unfinished[index] = self._thread.submit(request, partial(self._hear, index))
        except EndpointError as error:
            raise server_error(error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for ticket in self._unfinished.values():
            self._thread.cancel(ticket)

    async def reports(self) -> AsyncIterator[tuple[int, Progress | Finished]]:
        """Yield what becomes of the requests, each by its index, until all are finished.

        Raises: RequestError: the batcher turned one away or broke.
        """
        while True:
            while self._outcomes:
                index, outcome = self._outcomes.popleft()
                if isinstance(outcome, Rejection):
                    raise refusal(outcome)
                if isinstance(outcome, EndpointError):
                    raise server_error(outcome)
                yield index, outcome
            if not self._unfinished:
                return
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    async def finished(self) -> list[Finished]:
        """Wait for all requests and return what they became, in order."""
        results: dict[int, Finished] = {}
        async for index, report in self.reports():
            if isinstance(report, Finished):
                results[index] = report
        return [results[index] for index in range(len(self._requests))]

    def _hear(self, index: int, outcome: Outcome) -> None:
        if not isinstance(outcome, Progress):
            self._unfinished.pop(index, None)
        self._outcomes.append((index, outcome))
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Return the seed of one of `n` choices: the request's own for the first, independent streams for the others."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def refusal(rejection: Rejection) -> RequestError:
    """Return the reply to a request that the batcher did not take."""
    if rejection.kind == "overloaded":
        return overloaded(rejection.message)
    return RequestError(rejection.message, param=rejection.param)


def overloaded(message: str) -> RequestError:
    """Return the reply to a request that came at a bad time."""
    return RequestError(
        message, status=429, code="engine_overloaded", kind="rate_limit_error", retry_after_s=_RETRY_AFTER_S
    )


def server_error(error: EndpointError) -> RequestError:
    """Return the reply of an engine that is broken or stopping."""
    return RequestError(str(error), status=500, code="engine_failed", kind="server_error")
