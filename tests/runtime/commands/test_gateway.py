import contextlib
import signal
import subprocess
import sys
import urllib.request

import msgspec
import pytest
from openai import AuthenticationError, OpenAI

from turngate.runtime import cli
from turngate.runtime.transcript import read_trajectories

HI = [{"role": "user", "content": "hi"}]


@contextlib.contextmanager
def gateway(*arguments):
    """Run the command in a process of its own, and stop it by a signal; what it says last is in `process.last`."""
    start = "import sys; from turngate.runtime.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "gateway", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, process.stderr.read()
        process.last = process.stdout.read()
    finally:
        process.kill()
        process.communicate()


def test_every_api_key_is_an_episode_and_all_are_written_when_it_stops(serve, tmp_path):
    with gateway("--upstream", serve().url, "--record", str(tmp_path / "runs"), "--temperature", "1") as process:
        url = process.stdout.readline().split()[-1]
        assert process.stdout.readline().startswith("admin key: ")
        for key, turns in (("one", 2), ("two", 1)):
            with OpenAI(base_url=url, api_key=key) as client:
                for _ in range(turns):
                    client.chat.completions.create(model="any", messages=HI, max_tokens=4)
    assert process.last == f"2 episodes for {tmp_path / 'runs' / 'trajectories.jsonl'}; 2 can be trained on\n"
    trajectories = list(read_trajectories(tmp_path / "runs" / "trajectories.jsonl"))
    assert sorted(len(trajectory.turns) for trajectory in trajectories) == [1, 2]
    assert all(trajectory.trainable and trajectory.token_mode == "server" for trajectory in trajectories)


@pytest.mark.parametrize(
    ("context", "asked", "sent"),
    [(400, [], 100), (100_000, [], 1024), (400, ["--max-tokens", "300"], 300)],
)
def test_an_agent_that_names_no_cap_gets_one_that_fits_the_servers_context(serve, tmp_path, context, asked, sent):
    server = serve(max_model_len=context)
    with gateway("--upstream", server.url, "--record", str(tmp_path), "--temperature", "1", *asked) as process:
        with OpenAI(base_url=process.stdout.readline().split()[-1], api_key="one", max_retries=0) as client:
            client.chat.completions.create(model="any", messages=HI)
    assert server.requests[-1][2]["max_tokens"] == sent


def test_with_a_key_file_sessions_are_opened_by_its_key(serve, tmp_path):
    (tmp_path / "key").write_text("the-key\n")
    with gateway("--upstream", serve().url, "--key-file", str(tmp_path / "key")) as process:
        url = process.stdout.readline().split()[-1]
        request = urllib.request.Request(
            f"{url}/sessions", b'{"task": "x"}', {"Authorization": "Bearer the-key", "Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as reply:
            opened = msgspec.json.decode(reply.read())
        with OpenAI(base_url=opened["base_url"], api_key=opened["key"], max_retries=0) as client:
            assert client.chat.completions.create(model="any", messages=HI, max_tokens=4).choices
            with pytest.raises(AuthenticationError, match="must carry the key of a session"):
                client.with_options(api_key="other").chat.completions.create(model="any", messages=HI)


def test_what_cannot_work_is_explained_without_a_traceback(serve, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    url = serve().url
    for arguments, said in (
        (["--upstream", url, "--port", "70000"], "port must be in"),
        (["--upstream", url, "--key-file", str(tmp_path / "none")], "--key-file must be readable"),
        (["--upstream", url, "--record", str(tmp_path / "file" / "x")], "--record must be a folder"),
        (["--upstream", url, "--temperature", "-1"], "temperature must be"),
        (["--upstream", url, "--temperature", "1", "--max-tokens", "0"], "max_tokens must be"),
        (["--upstream", "localhost:80"], "http://"),
    ):
        assert cli.main(["gateway", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_a_judge_makes_a_guided_model(serve, tmp_path):
    arguments = ["--upstream", serve().url, "--judge", serve().url, "--draws", "3", "--record", str(tmp_path)]
    with gateway(*arguments) as process:
        url = process.stdout.readline().split()[-1]
        assert process.stdout.readline().startswith("admin key: ")
        name = process.stdout.readline().removeprefix("guided model: ").partition(",")[0]
        with OpenAI(base_url=url, api_key="one") as client:
            assert name in [model.id for model in client.models.list().data]
            client.chat.completions.create(model=name, messages=HI, max_tokens=4)
    assert process.last.startswith("0 of 1 decisions guided, 1 left to the base: error\n")  # the server only counts
    (trajectory,) = read_trajectories(tmp_path / "trajectories.jsonl")
    decision = trajectory.turns[0].decision
    assert (decision.source, len(decision.candidates)) == ("judge", 3)


def test_guidance_that_cannot_work_is_refused_before_anybody_asks(serve, capsys):
    url = serve().url
    for more, said in (
        (["--guided-by", url, "--judge", url], "must not come together"),
        (["--judge", url, "--beta", "-1"], "beta must be at least 0"),
        (["--judge", url, "--draws", "0"], "draws must be 1 or more"),
        (["--beta", "5"], "--beta must come with a source of values: expected --guided-by or --judge"),
        (
            ["--judge", url, "--guided-model", "prm"],
            "--guided-model must come with a source of values: expected --guid",
        ),
    ):
        assert cli.main(["gateway", "--upstream", url, "--port", "0", *more]) == 2
        assert said in capsys.readouterr().err


def test_values_that_do_not_answer_are_told_before_anybody_asks(serve, capsys):
    url = serve().url  # has no pooling
    assert cli.main(["gateway", "--upstream", url, "--port", "0", "--guided-by", url]) == 1
    assert "/pooling" in capsys.readouterr().err


def test_listening_to_the_world_without_a_key_is_warned_about(capsys, monkeypatch, tmp_path):
    async def nothing(*_):
        pass

    monkeypatch.setattr("turngate.runtime.commands.gateway._run", nothing)
    (tmp_path / "key").write_text("k")
    keyed = ["--key-file", str(tmp_path / "key")]
    for host, more, is_warned in (("0.0.0.0", [], True), ("0.0.0.0", keyed, False), ("127.0.0.1", [], False)):
        arguments = ["--upstream", "http://x/v1", "--record", str(tmp_path), "--host", host, *more]
        assert cli.main(["gateway", *arguments]) == 0
        assert ("without --key-file" in capsys.readouterr().err) == is_warned
