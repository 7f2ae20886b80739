"""Trajectories as text and as JSON lines."""

import pytest

from turngate.envs.base import End, Snapshot, Task, ToolCall
from turngate.envs.testing import CoinFlipEnv, EchoEnv
from turngate.runtime.errors import RecordError
from turngate.runtime.guidance import Guidance
from turngate.runtime.limits import Limits
from turngate.runtime.rollout import run_rollout
from turngate.runtime.runtime import Runtime
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.transcript import read_trajectories, render_transcript, write_trajectories
from turngate.runtime.types import Candidate, Decision, GuidedTokens, Message, RestartedFrom, Sampling, Trajectory, Turn


def episode(env=EchoEnv, script=("one", "two", "three"), **options):
    return run_virtual(run_rollout(env, Task("t1", "Say three things."), FakeEndpoint(script), **options))


def test_trajectories_survive_the_file_exactly(tmp_path):
    trajectories = [
        episode(),
        episode(limits=Limits(max_turns=1)),
        episode(CoinFlipEnv, ["heads", "x", "tails", "heads"], keep_snapshots=True),
    ]
    path = tmp_path / "some.jsonl"
    assert write_trajectories(path, trajectories) == 3
    assert list(read_trajectories(path)) == list(read_trajectories(str(path))) == trajectories
    assert isinstance(trajectories[2].turns[0].snapshot, Snapshot)
    assert trajectories[1].last_context != b""


def test_fields_that_records_no_longer_have_are_skipped(tmp_path):
    path = tmp_path / "old.jsonl"
    trajectory = episode()
    write_trajectories(path, [trajectory])
    old = path.read_text().replace('"model_s":', '"value":null,"model_s":')
    assert old.count("value") == len(trajectory.turns) > 0
    path.write_text(old)
    assert list(read_trajectories(path)) == [trajectory]


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "some.jsonl"
    write_trajectories(path, [episode()])
    path.write_bytes(path.read_bytes() + b'{"id": 3}\n')
    with pytest.raises(RecordError, match=r"Expected `str`, got `int` - at `\$\.id` \(.*some\.jsonl:2\)"):
        list(read_trajectories(path))


def test_a_transcript_reads_from_task_to_end():
    trajectory = episode(CoinFlipEnv, ["heads", "a very\nlong thought", "tails", "heads"], seed=1)
    text = render_transcript(trajectory)
    assert text.splitlines()[:3] == [
        "trajectory t1.1  task t1  seed 1",
        "    user  Say three things.",
        "  turn 0  heads",
    ]
    assert "  turn 1  a very\n          long thought\n  answer  Say heads or tails.\n          (invalid action)" in text
    assert text.splitlines()[-1].startswith(f"end {trajectory.end.value}  reward ")
    assert "4 turns  " in text
    assert "in 1 segments  policy version 0" in text


def test_a_transcript_shows_tool_calls_cuts_and_reasons():
    import msgspec

    trajectory = episode(limits=Limits(max_policy_tokens=2))
    turn = msgspec.structs.replace(trajectory.turns[0], tool_calls=(ToolCall("c", "look", '{"at": 1}'),))
    text = render_transcript(msgspec.structs.replace(trajectory, turns=(turn,), error="why", untrainable_because="x"))
    assert 'on [cut at 2 tokens]\n          look({"at": 1})' in text
    assert text.endswith("policy version 0  why")


def _itself():
    state: dict[str, object] = {"here": "ok"}
    state["there"] = [state]
    return state


def _deep():
    state: dict[str, object] = {}
    for _ in range(100_000):
        state = {"in": state}
    return state


class Unwritable:
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("state", "read"),
    [
        ({"text": "a\ud800", "n": 1}, {"text": "a\\ud800", "n": 1}),
        ({"\ud800": [("b\udfff",)]}, {"\\ud800": [["b\\udfff"]]}),
        ({(1, 2): 0.5}, {"(1, 2)": 0.5}),
        (_itself(), {"here": "ok", "there": ["<dict>"]}),
        ({"it": Unwritable(), Unwritable(): 1}, {"it": "<Unwritable>", "<Unwritable>": 1}),
        (_deep(), None),
    ],
    ids=["surrogate", "key", "tuple", "itself", "unwritable", "deep"],
)
def test_a_state_that_json_cannot_hold_is_written_as_text_and_reads_back(tmp_path, state, read):
    import msgspec

    trajectory = episode()
    first = msgspec.structs.replace(trajectory.turns[0], state=state)
    broken = msgspec.structs.replace(trajectory, turns=(first, *trajectory.turns[1:]))
    path = tmp_path / "some.jsonl"
    assert write_trajectories(path, [broken, trajectory]) == 2
    again, other = read_trajectories(path)
    assert other == trajectory
    assert again.segments == trajectory.segments
    assert again.turns[1:] == trajectory.turns[1:]
    state = again.turns[0].state
    assert state is not None
    assert state == read if read is not None else "in" in state


def test_any_text_that_utf8_cannot_carry_is_written_escaped(tmp_path):
    import msgspec

    trajectory = msgspec.structs.replace(episode(), error="\ud800", task=Task("t", "\ud801", {"a": "\ud802"}))
    path = tmp_path / "some.jsonl"
    write_trajectories(path, [trajectory])
    (again,) = read_trajectories(path)
    assert (again.error, again.task) == ("\\ud800", Task("t", "\\ud801", {"a": "\\ud802"}))


def test_a_restarted_episode_shows_where_it_came_from_and_what_was_injected() -> None:
    turns = tuple(
        Turn(index=i, segment=0, start=0, length=0, text=text, injected=text == "odd")
        for i, text in enumerate(("odd", "c"))
    )
    said = [Message("user", "q"), Message("assistant", "a"), Message("user", "oops")]
    for text in ("odd", "c"):
        said += [Message("assistant", text), Message("user", "on")]
    trajectory = Trajectory(
        id="g2.1", task=Task("t"), end=End.failure, turns=turns, messages=tuple(said),
        restarted_from=RestartedFrom("g0.3", 1, 7, "invalid"),
    )  # fmt: skip
    lines = render_transcript(trajectory).split("\n")
    assert lines[1:7] == [
        "restarted from trajectory g0.3 after 1 turns (invalid):",
        "    user  q",
        "assistant  a",
        "    user  oops",
        "  turn 0  odd",
        "  answer",
    ]
    assert lines[7] == "          (injected)"


async def prefers_right(point, candidates):
    return [2.0 if one.text == "right" else 1.0 for one in candidates]


async def knows_nothing(point, candidates):
    raise RuntimeError("out of ideas")


def guided(q, *, draws=4, **options):
    says = iter(["left", "right", "left", "up " * 60])

    async def play():
        limits, sampling = Limits(max_turns=1), Sampling(max_tokens=200)
        runtime = Runtime(FakeEndpoint(lambda messages: next(says)), limits=limits, sampling=sampling)
        return await runtime.rollout(EchoEnv, Task("t"), guidance=Guidance(q, draws=draws, **options))

    return render_transcript(run_virtual(play())).splitlines()


def test_a_guided_turn_shows_its_candidates_with_values_and_chances():
    lines = guided(prefers_right, beta=float("inf"), floor=0.2)
    assert lines[3] == "  choice  by values of prefers_right, beta inf, floor 0.2, of 4 drawn:"
    assert sorted(lines[4:7]) == [
        f"            1x  Q 1.00  p 0.05  {('up ' * 60)[:80]}...",
        "            2x  Q 1.00  p 0.10  left",
        "          > 1x  Q 2.00  p 0.85  right",
    ]
    assert lines[7].startswith("  answer")


def test_a_turn_left_to_the_base_says_why():
    lines = guided(knows_nothing, beta=1.0)
    assert lines[3].startswith("  choice  left to the base, of 4 drawn: error: ")
    assert "out of ideas" in lines[3]
    assert lines[4].startswith("  answer")


def test_equal_texts_of_other_values_and_listed_actions_are_told_apart():
    candidates = (
        Candidate(text="go", q=0.25, weight=0.25),
        Candidate(text="", tool_calls=(ToolCall("a", "go", "{}"),), q=None, weight=0.5),
        Candidate(text="go", q=0.5, weight=0.25),
    )
    decision = Decision(
        candidates=candidates, chosen=2, beta=5.0, log_selection=0.0, source="critic", is_enumerated=True
    )
    tilted = GuidedTokens(beta=5.0, top_k=8, tail="base", value_version=0, base_logprobs=b"")
    turn = Turn(index=0, segment=0, start=0, length=0, text="go", decision=decision, guided_tokens=tilted)
    text = render_transcript(Trajectory(id="a", task=Task("t"), turns=(turn,), end=End.success))
    assert "by values of critic, beta 5, of 3 listed:" in text
    assert "  1x  Q 0.25  p 0.25  go\n" in text
    assert "  1x  Q none  p 0.50  go({})\n" in text
    assert "> 1x  Q 0.50  p 0.25  go\n" in text
    assert "(every token guided, beta 5, top 8, tail base)" in text
