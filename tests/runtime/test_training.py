import asyncio
import json
import os
import random
import signal
import sys
import textwrap
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from turngate.envs.base import Action, End, Observation, Step, Task, ToolSpec
from turngate.runtime.capabilities import Capabilities, Finding
from turngate.runtime.dialect import Dialect
from turngate.runtime.errors import ConfigError, EndpointError, LearnerError, PublishError, PublishRefused
from turngate.runtime.limits import Limits
from turngate.runtime.run_folder import RunFolder
from turngate.runtime.runtime import Runtime
from turngate.runtime.scheduler import Collection
from turngate.runtime.testing.learner import CountingLearner
from turngate.runtime.training import train
from turngate.runtime.types import NO_VERSION, Batch, Completion, Message, Sampling, UpdateReport
from turngate.runtime.weights import InFlight, WeightPublisher

TASKS = [Task(f"t{n}") for n in range(7)]


class Walk:
    """Three turns, then success or failure by the seed."""

    closed = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        self.luck, self.left = random.Random(seed), 3
        return Observation("go")

    async def step(self, action: Action) -> Step:
        self.left -= 1
        await asyncio.sleep(0)
        if self.left:
            return Step(Observation("on"))
        good = self.luck.random() < 0.5
        return Step(Observation("done"), {"outcome": float(good)}, End.success if good else End.failure)

    async def aclose(self) -> None:
        Walk.closed += 1


class Served:
    """An endpoint and its publisher in memory; replies take a moment and carry the version serving at each token."""

    in_flight: InFlight = "continues"

    def __init__(self, *, delays: Sequence[float] = (0.0,), fail: type[Exception] | None = None) -> None:
        self.policy_version = 0
        self.serving = 0
        self.delays, self.fail = delays, fail
        self.calls = 0
        self.published: list[int] = []
        self.changed = asyncio.Event()
        self.publisher: WeightPublisher | None = self

    async def publish(self, path: Path, policy_version: int) -> None:
        assert path.exists()
        await asyncio.sleep(0)
        self.serving = policy_version
        self.published.append(policy_version)
        self.changed.set()
        self.changed = asyncio.Event()

    async def served_version(self) -> int:
        return self.serving

    async def until_published(self, times: int) -> None:
        while len(self.published) < times:
            await self.changed.wait()

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int | None = None,
        tools: Sequence[ToolSpec] = (),
        timeout_s: float = 60.0,
    ) -> Completion:
        self.calls += 1
        if self.fail is not None:
            raise self.fail("the server is on fire")
        sent, first = self.policy_version, self.serving
        await asyncio.sleep(self.delays[self.calls % len(self.delays)])
        prompt = [n % 5 for n in range(3 * len(messages))]
        return Completion(
            "a", [7, 8], [-0.5, -0.25], [first, self.serving], prompt, "stop", (), sent, self.policy_version
        )

    async def aclose(self) -> None:
        pass


async def _train(served: Served, folder: Path, **options: Any) -> Any:
    runtime = Runtime(served, limits=Limits(max_turns=8), max_concurrent=options.pop("max_concurrent", 16))
    settings: dict[str, Any] = {"group_size": 4, "groups_per_batch": 3, "updates": 5, "worker": "thread", "seed": 1}
    learner = options.pop("learner", None) or CountingLearner()
    report = await train(runtime, Walk, TASKS, learner=learner, run_dir=folder, **(settings | options))
    assert runtime.slots.held == 0
    return report


async def test_training_trains_every_batch_and_accounts_for_every_rollout(tmp_path: Path) -> None:
    served = Served()
    report = await _train(served, tmp_path)
    assert report.updates == report.policy_version == 5
    assert served.published == [1, 2, 3, 4, 5]
    assert report.ledger.trained == 5 * 3 * 4
    assert report.ledger.drawn == report.ledger.trained + sum(report.ledger.dropped.values())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 3, 4, 5]
    assert json.loads((tmp_path / "report.json").read_text())["policy_version"] == 5
    assert (tmp_path / "checkpoints" / "update-000005" / "count").read_text() == "5"
    assert not (tmp_path / "weights").exists()
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["train"]["updates"], config["env"], config["limits"]["max_turns"]) == (5, "Walk", 8)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "rollout_finished" for event in events) == report.ledger.drawn


async def test_a_run_keeps_what_is_known_of_the_server_and_is_refused_where_it_cannot_train(tmp_path: Path) -> None:
    served = Served()
    served.dialect = Dialect()
    served.capabilities = Capabilities(url="u", model="m", chat=Finding("yes", "said hi"))
    with pytest.raises(ConfigError, match=r"training must be possible on this server: token ids must come back"):
        await _train(served, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    good = {name: Finding("yes", "seen") for name in ("chat", "prompt_ids", "sampled_ids", "logprobs")}
    served.capabilities = Capabilities(url="u", model="m", **good)
    await _train(served, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["token_mode"] == "server"
    assert config["capabilities"]["logprobs"] == {"verdict": "yes", "seen": "seen"}


async def test_no_staleness_is_exactly_synchronous(tmp_path: Path) -> None:
    report = await _train(Served(delays=(0.0, 0.001, 0.003)), tmp_path, max_staleness=0)
    assert [row["lag_max"] for row in report.history] == [0, 0, 0, 0, 0]
    assert [row["version_span_max"] for row in report.history] == [0, 0, 0, 0, 0]
    assert report.ledger.drawn == 5 * 3 * 4  # nothing was submitted ahead


async def test_a_server_that_outlives_the_script_keeps_counting(tmp_path: Path) -> None:
    served = Served()
    served.serving = 9  # a fresh endpoint object of a new process does not know
    report = await _train(served, tmp_path, updates=2)
    assert served.published == [10, 11, 12]
    assert report.policy_version == 12


async def test_a_run_killed_before_its_first_update_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="exit code 7"):
        await _train(Served(), tmp_path, learner=CountingLearner(die_at=0), worker="process")
    report = await _train(Served(), tmp_path, updates=2, resume=True)
    assert [row["update"] for row in report.history] == [1, 2]


@pytest.mark.parametrize("late", ["wait", "drop", "mask"])
async def test_tokens_span_updates_and_none_is_staler_than_the_bound(tmp_path: Path, late: str) -> None:
    delays = (0.0, 0.001, 0.0, 0.02, 0.002)  # a heavy tail: some turns outlast several updates
    report = await _train(Served(delays=delays), tmp_path, max_staleness=2, late=late, updates=25)
    assert max(row["lag_max"] for row in report.history) <= 2
    if late != "mask":  # under mask the learner is told which tokens are too old
        assert max(row["learner_lag_max"] for row in report.history) <= 2
    assert max(row["version_span_max"] for row in report.history) >= 1
    assert max(row["lag_max"] for row in report.history) >= 1


async def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    await _train(Served(), tmp_path, updates=3)
    served = Served()
    report = await _train(served, tmp_path, updates=6, resume=True)
    assert served.published == [3, 4, 5, 6]  # the checkpoint's own weights first
    assert (report.updates, report.policy_version) == (6, 6)
    assert report.ledger.trained == 6 * 3 * 4
    assert report.ledger.drawn == report.ledger.trained + sum(report.ledger.dropped.values())
    assert [row["count"] for row in report.history] == [1, 2, 3, 4, 5, 6]  # the whole run's


async def test_a_second_run_against_a_server_that_is_ahead_keeps_counting(tmp_path: Path) -> None:
    served = Served()
    served.policy_version = served.serving = 9
    report = await _train(served, tmp_path, updates=2)
    assert served.published == [10, 11, 12]
    assert (report.updates, report.policy_version) == (2, 12)


async def test_a_cancelled_run_leaves_a_checkpoint_and_nothing_running(tmp_path: Path) -> None:
    served, closed = Served(delays=(0.001, 0.002)), Walk.closed
    running = asyncio.create_task(_train(served, tmp_path, updates=10_000, checkpoint_every=10_000))
    await served.until_published(4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert Walk.closed > closed
    calls = served.calls
    await asyncio.sleep(0.02)
    assert served.calls == calls
    report = await _train(served, tmp_path, updates=12, resume=True)
    assert report.ledger.trained == 12 * 3 * 4
    assert report.ledger.dropped.get("interrupted", 0) + report.ledger.dropped.get("cancelled", 0) > 0


async def test_a_run_cancelled_during_an_update_counts_that_update_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served()
    running = asyncio.create_task(_train(served, tmp_path, learner=CountingLearner(update_s=0.1), updates=100))
    await served.until_published(1)
    await asyncio.sleep(0.05)  # in the middle of the second update
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["update"], row["count"]) for row in rows] == [(1, 1), (2, 2)]  # what it reported is not lost either
    assert [record.getMessage() for record in caplog.records] == [
        "stopping: waiting for the update in progress, up to 120 s; interrupt again to give it up",
        f"checkpoint {tmp_path / 'checkpoints' / 'update-000002'} written; go on with resume=True",
    ]
    report = await _train(Served(), tmp_path, updates=3, resume=True)
    assert report.ledger.trained == 3 * 3 * 4
    assert report.policy_version == 3
    assert [row["update"] for row in report.history] == [1, 2, 3]


class Boasting(CountingLearner):
    """Calls its metrics like the run's own."""

    def update(self, batch: Batch) -> UpdateReport:
        super().update(batch)
        return UpdateReport({"update": -1.0, "learner_update": -2.0, "policy_version": -3.0, "reward": -4.0, "x": -5.0})


async def test_a_learners_metrics_never_replace_the_runs_own(tmp_path: Path) -> None:
    report = await _train(Served(), tmp_path, updates=2, learner=Boasting())
    assert [(row["update"], row["policy_version"]) for row in report.history] == [(1, 1), (2, 2)]
    last = report.history[-1]
    assert last["reward"] >= 0
    assert (last["learner_policy_version"], last["learner_reward"], last["x"]) == (-3, -4, -5)
    assert (last["learner_update"], last["learner_learner_update"]) == (-1, -2)
    resumed = await _train(Served(), tmp_path, updates=3, resume=True, learner=Boasting())
    assert [row["update"] for row in resumed.history] == [1, 2, 3]


SCRIPT = """
    import asyncio, sys
    from pathlib import Path
    from turngate.envs.base import End, Observation, Step, Task
    from turngate.runtime import Runtime, train
    from turngate.runtime.testing import FakeEndpoint
    from turngate.runtime.testing.learner import CountingLearner

    class Env:
        async def reset(self, task, seed):
            return Observation("go")

        async def step(self, action):
            return Step(Observation("done"), {"outcome": 1.0}, End.success)

        async def aclose(self):
            pass

    class Announcing(CountingLearner):
        def update(self, batch):
            print("learning", flush=True)
            return super().update(batch)

    class Publisher:
        async def publish(self, path, version):
            pass

        async def served_version(self):
            return 0

    async def main():
        runtime = Runtime(FakeEndpoint(lambda messages: "a"))
        await train(
            runtime, Env, [Task("t")], learner=Announcing(update_s=float(sys.argv[2])), publisher=Publisher(),
            updates=9, group_size=2, groups_per_batch=1, run_dir=Path(sys.argv[1]),
        )

    if __name__ == "__main__":
        asyncio.run(main())
"""


async def _interrupt(folder: Path, update_s: float, numbers: Sequence[int]) -> tuple[int | None, str]:
    """Run the script above, send the signals to all its processes during its first update, and return how it ended."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, folder / "run", str(update_s), stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    told = b""
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"learning\n"
            for number in numbers:
                await asyncio.sleep(0.1)  # people are not faster, and Python may raise the second Ctrl-C just anywhere
                os.killpg(process.pid, number)
                told += await process.stderr.readline()
            told += (await process.communicate())[1]  # ends when the learner is gone as well
        return process.returncode, told.decode()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
async def test_a_signal_lets_the_update_finish_and_says_so(tmp_path: Path, number: int, status: int) -> None:
    ended, told = await _interrupt(tmp_path, 0.5, [number])
    final = tmp_path / "run" / "checkpoints" / "update-000001"
    assert told.splitlines()[:2] == [
        "stopping: waiting for the update in progress, up to 120 s; interrupt again to give it up",
        f"checkpoint {final} written; go on with resume=True",
    ]
    assert ended == status
    assert (final / "count").read_text() == "1"
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["count"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_the_script_at_once(tmp_path: Path, number: int) -> None:
    ended, told = await _interrupt(tmp_path, 600.0, [number, number])
    assert "up to 120 s" in told
    assert "written" not in told
    assert ended == -number


async def test_a_dying_learner_stops_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="exit code 7"):
        await _train(Served(), tmp_path, learner=CountingLearner(die_at=2), worker="process", checkpoint_every=1)
    assert (tmp_path / "checkpoints" / "update-000002" / "count").read_text() == "2"


async def test_a_broken_server_stops_the_run_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=r"12 rollouts failed in a row.*the server is on fire"):
        await _train(
            Served(fail=EndpointError), tmp_path, collection=Collection(group_size=4, failure_limit=12), group_size=4
        )


async def test_a_failed_publication_stops_the_run_and_keeps_the_version(tmp_path: Path) -> None:
    class Refusing(Served):
        async def publish(self, path: Path, policy_version: int) -> None:
            raise PublishRefused("no")

    served = Refusing()
    with pytest.raises(PublishRefused):
        await _train(served, tmp_path)
    assert served.policy_version == 0


async def test_a_publication_that_fails_for_a_while_is_repeated_and_rollouts_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Restarting(Served):
        failures = 0

        async def publish(self, path: Path, policy_version: int) -> None:
            if self.failures < 2:
                self.failures += 1
                assert self.policy_version == policy_version - 1  # the counter waits for the server
                raise PublishError("restarting")
            await super().publish(path, policy_version)

    monkeypatch.setattr("turngate.runtime.weights.RETRY_PAUSES_S", (0.0, 0.0))
    served = Restarting()
    report = await _train(served, tmp_path)
    assert (served.failures, served.published) == (2, list(range(1, report.updates + 1)))


@pytest.mark.parametrize("answers_alike", [True, False])
async def test_a_server_that_does_not_answer_like_the_learner_is_given_its_weights_first(
    tmp_path: Path, answers_alike: bool
) -> None:
    class Asked(Served):
        async def is_serving(self, path: Path) -> bool:
            assert path.exists()
            return answers_alike

    served = Asked()
    report = await _train(served, tmp_path)
    first = 1 if answers_alike else 2
    assert served.published == [*([] if answers_alike else [1]), *range(first, first + report.updates)]
    assert report.policy_version == served.policy_version == served.published[-1]


async def test_an_endpoint_asks_for_the_name_that_each_version_is_published_under(tmp_path: Path) -> None:
    class Named(Served):
        model = "base"

        async def publish(self, path: Path, policy_version: int) -> None:
            await super().publish(path, policy_version)
            self.newest = f"policy-{policy_version}"

    class Publisher:
        in_flight = "continues"

        def __init__(self, served: Named) -> None:
            self.publish, self.served_version, self.served = served.publish, served.served_version, served

        @property
        def model(self) -> str:
            return self.served.newest

    served = Named()
    report = await _train(served, tmp_path, publisher=Publisher(served))
    assert served.model == f"policy-{report.policy_version}"


async def test_untrainable_rollouts_are_refused_with_the_reason(tmp_path: Path) -> None:
    class Wordy(Served):
        async def complete(self, *args: Any, **kwargs: Any) -> Completion:
            return Completion("a")

    with pytest.raises(ConfigError, match="training needs token ids and log-probs from the server: the server gave no"):
        await _train(Wordy(), tmp_path)


async def test_environments_that_fail_now_and_then_are_refilled(tmp_path: Path) -> None:
    class Flaky(Walk):
        steps = 0

        async def step(self, action: Action) -> Step:
            Flaky.steps += 1
            if Flaky.steps % 17 == 0:
                raise OSError("flaky")
            return await super().step(action)

    runtime = Runtime(Served(), limits=Limits(max_turns=8), max_concurrent=16)
    report = await train(
        runtime,
        Flaky,
        TASKS,
        learner=CountingLearner(),
        run_dir=tmp_path,
        updates=8,
        group_size=4,
        groups_per_batch=3,
        worker="thread",
    )
    assert report.ledger.trained + sum(report.ledger.dropped.values()) == report.ledger.drawn
    assert report.ledger.dropped["env_error"] > 0
    assert report.updates == 8


@pytest.mark.parametrize("worker", ["process", "thread"])
async def test_whatever_an_environment_leaves_in_state_harms_no_one(tmp_path: Path, worker: str) -> None:
    class Leaving(Walk):
        async def step(self, action: Action) -> Step:
            step = await super().step(action)
            return msgspec.structs.replace(step, state={"page": Path("x"), "done": not self.left})

    runtime = Runtime(Served(), max_concurrent=16)
    await train(
        runtime, Leaving, TASKS, learner=CountingLearner(), run_dir=tmp_path, updates=1, group_size=2,
        groups_per_batch=2, worker=worker, keep_trajectories_every=1,
    )  # fmt: skip
    kept = json.loads((tmp_path / "trajectories" / "update-000001.jsonl").read_text().splitlines()[0])
    assert kept["turns"][0]["state"] == {"page": "x", "done": False}


async def test_a_row_that_cannot_be_written_costs_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = RunFolder.append_metrics

    def full_disk(self: RunFolder, row: dict[str, Any]) -> None:
        if row["update"] >= 3:
            raise OSError(28, "no space left on device")
        append(self, row)

    monkeypatch.setattr(RunFolder, "append_metrics", full_disk)
    with pytest.raises(OSError, match="no space left"):
        await _train(Served(), tmp_path / "run")
    checkpoint = RunFolder(tmp_path / "run", resume=True).latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint[1].update == 3


class OtherLearner(CountingLearner):
    """Another learner."""


async def test_a_run_does_not_go_on_with_another_learner(tmp_path: Path) -> None:
    await _train(Served(), tmp_path / "run", updates=1)
    with pytest.raises(ConfigError, match="expected CountingLearner, got OtherLearner"):
        await _train(Served(), tmp_path / "run", learner=OtherLearner(), resume=True)


async def test_a_used_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    await _train(Served(), tmp_path, updates=1)
    with pytest.raises(ConfigError, match="already holds a run"):
        await _train(Served(), tmp_path, updates=1)


async def test_resuming_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume needs a checkpoint"):
        await _train(Served(), tmp_path, resume=True)


async def test_an_endpoint_without_publisher_is_refused(tmp_path: Path) -> None:
    served = Served()
    served.publisher = None
    with pytest.raises(ConfigError, match="needs a weight publisher"):
        await _train(served, tmp_path)


async def test_kept_trajectories_can_be_read_back(tmp_path: Path) -> None:
    from turngate.runtime.transcript import read_trajectories

    await _train(Served(), tmp_path, updates=2, keep_trajectories_every=2)
    kept = list(read_trajectories(tmp_path / "trajectories" / "update-000002.jsonl"))
    assert len(kept) == 12
    assert all(v >= NO_VERSION for t in kept for s in t.segments for v in s.version_values())


class Critical(CountingLearner):
    """A learner with a critic: wants whole last contexts and stale groups, and keeps what it got."""

    needs_last_context = True
    wants_stale = True

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []
        self.staleness: list[int] = []

    def check_staleness(self, max_staleness: int) -> None:
        self.staleness.append(max_staleness)

    def update(self, batch: Batch) -> UpdateReport:
        self.batches.append(batch)
        return super().update(batch)


@pytest.mark.parametrize("learner", [CountingLearner(), Critical()])
async def test_a_learner_that_needs_last_contexts_gets_them_whole(tmp_path: Path, learner: CountingLearner) -> None:
    served = Served()
    runtime = Runtime(served, limits=Limits(max_turns=2))
    options: dict[str, Any] = {"updates": 1, "group_size": 2, "groups_per_batch": 2, "worker": "thread"}
    report = await train(runtime, Walk, TASKS, learner=learner, run_dir=tmp_path, **options, max_staleness=1)
    drawn_turns = 2 * report.ledger.drawn
    if isinstance(learner, Critical):
        members = [t for g in learner.batches[0].groups for t in g.trajectories]
        assert all(t.last_context_is_whole and len(t.last_context) == 4 * 15 for t in members)  # 3 per message
        assert served.calls > drawn_turns
        assert learner.staleness == [1]
    else:
        assert served.calls <= drawn_turns


async def test_stale_groups_reach_a_critic_that_wants_them_and_count_as_dropped(tmp_path: Path) -> None:
    learner = Critical()
    delays = (0.0, 0.001, 0.0, 0.02, 0.002)
    report = await _train(Served(delays=delays), tmp_path, learner=learner, max_staleness=1, late="drop", updates=25)
    stale = [t.id for batch in learner.batches for g in batch.stale for t in g.trajectories]
    trained = [t.id for batch in learner.batches for g in batch.groups for t in g.trajectories]
    assert stale
    assert len(set(stale)) == len(stale)
    assert not set(stale) & set(trained)
    assert len(stale) <= report.ledger.dropped["stale"]
    assert sum(row["groups_stale_kept"] for row in report.history) == len([g for b in learner.batches for g in b.stale])
    assert report.ledger.trained == len(trained) == 25 * 3 * 4
