import asyncio
from collections.abc import Callable

import msgspec
import pytest

from turngate.envs.base import End, Snapshot, Task
from turngate.envs.fakes import EchoEnv
from turngate.runtime.buffer import Buffer
from turngate.runtime.errors import ConfigError, EnvError
from turngate.runtime.events import GroupDropped, GroupFinished
from turngate.runtime.ledger import Ledger
from turngate.runtime.restarts import RestartPoint, Restarts, RestartStore
from turngate.runtime.runtime import Runtime
from turngate.runtime.scheduler import Collection, Collector, TaskStream
from turngate.runtime.staleness import StalenessLimit
from turngate.runtime.testing import FakeEndpoint
from turngate.runtime.types import Group, Message, RestartedFrom, Segment, Trajectory, Turn

TASKS = [Task(str(n)) for n in range(5)]


def _names(stream: TaskStream, n: int) -> list[str]:
    return [stream.next().id for _ in range(n)]


def test_every_epoch_holds_every_task_once_in_another_order() -> None:
    stream = TaskStream(TASKS, seed=3)
    first, second = _names(stream, 5), _names(stream, 5)
    assert sorted(first) == sorted(second) == ["0", "1", "2", "3", "4"]
    assert first != second


def test_a_stream_goes_on_from_any_position() -> None:
    whole = _names(TaskStream(TASKS, seed=3), 12)
    assert _names(TaskStream(TASKS, seed=3, position=7), 5) == whole[7:]


def test_requeued_tasks_go_first_and_move_no_position() -> None:
    stream = TaskStream(TASKS, seed=3, requeued=["4", "gone"])
    stream.requeue(TASKS[2])
    assert _names(stream, 2) == ["4", "2"]
    assert stream.position == 0


@pytest.mark.parametrize(("tasks", "says"), [([], "must not be empty"), ([Task("a"), Task("a")], "must be unique")])
def test_unusable_tasks_are_refused(tasks: list[Task], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TaskStream(tasks, seed=0)


def test_a_group_cannot_need_more_members_than_it_has() -> None:
    with pytest.raises(ConfigError, match="between 1 and group_size 4: got 5"):
        Collection(group_size=4, min_group=5)


# The collector, with rollouts that end as a script says.

Script = Callable[[str, int], End]
"""(trajectory id, environment seed) -> how the rollout ends."""


class ScriptedRuntime(Runtime):
    """Plays no environment: each rollout takes a moment and ends as the script says."""

    def __init__(self, script: Script, *, max_concurrent: int = 8) -> None:
        super().__init__(FakeEndpoint(["one"]), max_concurrent=max_concurrent)
        self.script, self.seeds = script, dict[str, int]()
        self.starts = dict[str, RestartPoint | None]()
        self.blocked = asyncio.Event()

    async def rollout(
        self, env, task, *, seed=0, env_seed=None, group_id="", member=0, trajectory_id="", start=None, **_
    ):
        self.seeds[trajectory_id] = env_seed
        self.starts[trajectory_id] = start
        await asyncio.sleep(0)
        end = self.script(trajectory_id, env_seed or 0)
        if end is End.cancelled:
            await self.blocked.wait()
        length = 0 if end is End.token_limit else 1
        segment = Segment.of(
            [1] * length, [1] * length, [0.0] * length, [self.endpoint.policy_version] * length, [0] * length
        )
        turn = Turn(index=0, segment=0, start=0, length=length, text="")
        error = "scripted" if end.is_failure else ""
        # Turn 0 is a mistake; the state after it is worth starting from.
        turns = (msgspec.structs.replace(turn, valid=False), Turn(
            index=1, segment=0, start=length, length=0, text="", snapshot=Snapshot("scripted", b""),
        ))  # fmt: skip
        said = Message("assistant", "")
        return Trajectory(
            id=trajectory_id, task=task, group_id=group_id, member=member, end=end, error=error,
            turns=turns, segments=(segment,), messages=(Message("user", "go"), said, said),
            restarted_from=start.restarted_from if start is not None else None,
        )  # fmt: skip


class Lab:
    """A collector with its neighbours, run until nothing moves any more."""

    def __init__(
        self,
        script: Script,
        *,
        late: str = "wait",
        groups: int = 2,
        restarts: Restarts | None = None,
        **config: int | bool,
    ) -> None:
        self.restarts = None if restarts is None else RestartStore(restarts)
        self.runtime = ScriptedRuntime(script)
        self.ledger = Ledger()
        self.stream = TaskStream(TASKS, seed=0)
        self.buffer = Buffer(
            groups_per_batch=groups,
            limit=StalenessLimit(max_staleness=0, late=late),
            on_stale=lambda group: self.collector.drop_stale(group),
        )
        self.collector = Collector(
            self.runtime, EchoEnv, self.stream, buffer=self.buffer, ledger=self.ledger,
            config=Collection(group_size=3, **config), seed=5, restarts=self.restarts,
        )  # fmt: skip
        self.dropped: list[GroupDropped] = []
        self.finished: list[GroupFinished] = []
        self.runtime.events.subscribe(GroupDropped, self.dropped.append)
        self.runtime.events.subscribe(GroupFinished, self.finished.append)

    async def run(self) -> None:
        running = asyncio.create_task(self.collector.run())
        try:
            for _ in range(200):
                await asyncio.sleep(0)
                if running.done():
                    await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self.ledger.check()
            assert self.runtime.slots.held == 0


def _always(end: End) -> Script:
    return lambda trajectory_id, env_seed: end


async def test_groups_fill_the_buffer_up_to_its_gate() -> None:
    lab = Lab(_always(End.success))
    await lab.run()
    assert [len(event.group.trajectories) for event in lab.finished] == [3, 3]
    assert (lab.ledger.drawn, lab.ledger.totals().live) == (6, {"admitted": 6})


async def test_members_of_a_group_meet_the_same_environment_and_groups_another() -> None:
    lab = Lab(_always(End.success))
    await lab.run()
    first = {lab.runtime.seeds[f"g0.{m}"] for m in range(3)}
    assert len(first) == 1
    assert first != {lab.runtime.seeds["g1.0"]}


async def test_members_have_luck_of_their_own_when_asked() -> None:
    lab = Lab(_always(End.success), share_env_seed=False)
    await lab.run()
    assert lab.runtime.seeds["g0.0"] is None


async def test_a_failed_member_is_run_again_and_harms_no_sibling() -> None:
    lab = Lab(lambda name, _: End.env_error if name == "g0.1" else End.success)
    await lab.run()
    members = [t.id for t in lab.finished[-1].group.trajectories]
    assert sorted(len(event.group.trajectories) for event in lab.finished) == [3, 3]
    assert lab.ledger.dropped == {"env_error": 1}
    assert "g0.1.1" in members or "g0.1.1" in [t.id for t in lab.finished[0].group.trajectories]


async def test_a_group_with_too_few_members_is_dropped_and_its_task_runs_again() -> None:
    lab = Lab(lambda name, _: End.env_error if name.startswith("g0.") and name[3] != "0" else End.success, refills=0)
    await lab.run()
    (dropped,) = lab.dropped
    assert (dropped.group_id, dropped.reason, dropped.rollouts) == ("g0", "group_incomplete", 1)
    assert lab.ledger.dropped == {"env_error": 2, "group_incomplete": 1}
    assert dropped.task_id in [event.group.task.id for event in lab.finished]
    assert len(lab.finished) == 2  # its place was given back


async def test_a_task_that_never_works_is_given_up_after_its_requeues() -> None:
    hopeless = TaskStream(TASKS, seed=0).next().id
    ends: list[str] = []

    def script(name: str, _: int) -> End:
        task = lab.collector.started_groups[int(name[1 : name.index(".")])]
        ends.append(task.id)
        return End.env_error if task.id == hopeless else End.success

    lab = Lab(script, refills=0, requeues=2)
    await lab.run()
    assert ends.count(hopeless) == 3 * 3
    assert [event.task_id for event in lab.dropped] == [hopeless] * 3


async def test_a_run_whose_rollouts_often_fail_says_so_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    lab = Lab(lambda name, _: End.env_error if name.endswith((".0", ".1")) and name.count(".") == 1 else End.success,
              groups=100)  # fmt: skip
    await lab.run()
    assert (lab.ledger.dropped["env_error"], len(lab.finished)) == (
        200,
        100,
    )  # two of five rollouts, one warning per 256
    (record,) = caplog.records
    assert "of the last 256 rollouts failed, the last with env_error" in record.getMessage()


async def test_episodes_without_a_token_count_as_failures() -> None:
    lab = Lab(_always(End.token_limit), failure_limit=5)
    with pytest.raises(BaseExceptionGroup) as caught:
        await lab.run()
    assert caught.group_contains(
        EnvError, match="5 rollouts failed in a row, the last with empty: no token was generated"
    )


async def test_what_the_buffer_finds_too_old_is_counted_and_its_task_runs_again() -> None:
    lab = Lab(lambda name, _: End.cancelled if name == "g0.0" else End.success, late="drop", groups=1)
    running = asyncio.create_task(lab.run())
    for _ in range(20):
        await asyncio.sleep(0)
    # A version is published while g0 is under way.
    lab.buffer.policy_version = lab.runtime.endpoint.policy_version = 1
    lab.runtime.blocked.set()
    await running
    assert [(event.reason, event.staleness, event.rollouts) for event in lab.dropped] == [("stale", 1, 3)]
    assert lab.ledger.dropped["stale"] == 3
    assert "g0" not in [event.group.id for event in lab.finished]


async def test_cancelling_in_the_middle_of_a_group_drops_every_member() -> None:
    lab = Lab(lambda name, _: End.cancelled if name.endswith(".2") else End.success)
    await lab.run()
    assert lab.ledger.dropped == {"cancelled": 6}
    assert not lab.ledger.live
    assert lab.buffer.statistics().running == 0
    assert len(lab.collector.unfinished()) == 2


async def test_groups_that_come_to_nothing_one_after_the_other_stop_the_run() -> None:
    lab = Lab(
        lambda name, _: End.success if name.endswith(".0") else End.env_error,  # so failures are never many in a row
        refills=0, group_failure_limit=4, failure_limit=12,
    )  # fmt: skip
    with pytest.raises(BaseExceptionGroup) as caught:
        await lab.run()
    assert caught.group_contains(
        EnvError, match=r"4 groups in a row came to nothing for want of 2 members.* failed with env_error: scripted"
    )


async def test_a_group_that_is_admitted_lets_the_count_of_lost_groups_start_again() -> None:
    lab = Lab(
        lambda name, _: End.env_error if int(name[1 : name.index(".")]) % 3 and ".0" not in name else End.success,
        groups=9, refills=0, group_failure_limit=6, failure_limit=100,
    )  # fmt: skip
    await lab.run()
    assert len(lab.dropped) > 6
    assert len(lab.finished) == 9


@pytest.mark.parametrize("bad", [{"refills": -1}, {"requeues": -1}, {"failure_limit": 0}, {"group_failure_limit": 0}])
def test_counts_that_would_spin_for_ever_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="0 or more"):
        Collection(**bad)


# Restart groups.


def consume(lab: Lab, batches: int) -> list[Group]:
    """Train on what is ready, as a run does, and return it."""
    groups: list[Group] = []
    for _ in range(batches):
        batch = lab.buffer.take_now()
        assert batch is not None
        lab.ledger.train([t.id for g in batch.groups for t in g.trajectories])
        lab.collector.consumed(batch.groups)
        lab.buffer.advance(lab.buffer.policy_version + 1)
        groups += batch.groups
    return groups


async def test_b8_1_restart_members_are_never_in_a_group_with_root_members() -> None:
    # One baseline over both would compare episodes that had different starts.
    lab = Lab(lambda *_: End.success, groups=40, restarts=Restarts(share=0.5))
    await lab.run()
    groups = consume(lab, 1)
    origins = [{t.restarted_from for t in g.trajectories} for g in groups]
    assert all(len(members) == 1 for members in origins)
    restarted = [g for g in groups if g.restarted_from is not None]
    assert 5 < len(restarted) < 35
    assert len({g.id for g in groups}) == 40
    for group in restarted:
        points = [lab.runtime.starts[t.id] for t in group.trajectories]
        assert points[0] is not None
        assert all(point is points[0] for point in points)
        assert group.task.id == points[0].task.id
    assert lab.restarts is not None
    assert lab.restarts.statistics().tried > 0


async def test_restart_groups_draw_no_task_and_are_not_run_again_after_a_stop() -> None:
    lab = Lab(lambda *_: End.success, groups=20, restarts=Restarts(share=0.5))
    await lab.run()
    roots = sum(start is None for start in lab.runtime.starts.values()) // 3
    assert lab.stream.position == len(lab.collector.unfinished()) == roots < 20
    consume(lab, 1)
    assert lab.collector.unfinished() == ()
    lab.ledger.check()
    assert (lab.ledger.drawn, lab.ledger.trained) == (60, 60)


async def test_a_restart_group_that_comes_to_nothing_is_dropped_with_its_state_and_no_task_is_requeued() -> None:
    lab: Lab

    def script(name: str, _: int) -> End:
        return End.success if lab.runtime.starts[name] is None else End.env_error

    lab = Lab(script, groups=12, restarts=Restarts(share=0.5), refills=0, failure_limit=999)
    await lab.run()
    assert len(lab.finished) == 12  # groups from task starts took the others' places
    assert lab.dropped
    assert all(lab.runtime.starts[f"{event.group_id}.0"] is not None for event in lab.dropped)
    assert lab.stream.position == 12
    assert lab.stream.waiting() == ()
    assert lab.restarts is not None
    assert lab.restarts.statistics().drawn == len(lab.dropped)
    assert lab.ledger.drawn == 36 + 3 * len(lab.dropped)


async def test_a_stale_restart_group_is_dropped_and_no_task_is_requeued() -> None:
    lab = Lab(lambda *_: End.success, late="drop", groups=2, restarts=Restarts(share=1.0))
    await lab.run()
    assert [g.restarted_from for g in consume(lab, 1)] == [None, None]
    lab.runtime.endpoint.policy_version = 1
    await lab.run()
    assert lab.runtime.starts["g2.0"] is not None
    assert lab.runtime.starts["g3.0"] is not None
    lab.buffer.advance(2)  # eta 0: what version 1 sampled is too old
    assert lab.ledger.dropped == {"stale": 6}
    assert (lab.stream.position, lab.stream.waiting()) == (2, ())
    lab.ledger.check()


def test_a_restart_group_that_was_trained_on_is_no_news_of_its_tasks_start() -> None:
    lab = Lab(lambda *_: End.success, requeues=1)
    lost = Group(id="g0", task=TASKS[0], order=0, trajectories=())
    origin = RestartedFrom("g0.0", 1, 0, "invalid")
    member = Trajectory(id="g1.0", task=TASKS[0], end=End.success, restarted_from=origin)
    for _ in range(2):
        lab.collector.drop_stale(lost)
        lab.collector.consumed([Group(id="g1", task=TASKS[0], order=1, trajectories=(member,))])
    assert lab.stream.waiting() == ("0",)  # requeued once, as often as it may be
