import asyncio
import os
import signal

import pytest

from turngate.runtime import cli
from turngate.runtime.engine import server
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path):
    tokenizer = Tokenizer.train(["buy the red one"])
    config = ModelConfig(vocab_size=len(tokenizer), width=8, layers=1, heads=1, head_dim=8, mlp_width=8, max_context=32)
    PolicyModel(config).save(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")
    return tmp_path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_serves_until_it_is_signalled(folder, capsys, monkeypatch, number):
    served = []
    serve = server.serve

    async def serve_and_signal(model, tokenizer, config, stop, *, critic, on_ready):
        served.append(config)

        def signal_when_ready(port):
            on_ready(port)
            os.kill(os.getpid(), number)

        await serve(model, tokenizer, config, stop, critic=critic, on_ready=signal_when_ready)

    monkeypatch.setattr(server, "serve", serve_and_signal)
    monkeypatch.setenv("TURNGATE_API_KEY", "from the environment")
    assert cli.main(["serve", str(folder), "--port", "0", "--max-running", "4", "--model-name", "shopper"]) == 0
    (config,) = served
    assert (config.max_running, config.model_name, config.api_key) == (4, "shopper", "from the environment")
    assert capsys.readouterr().out.startswith("serving shopper at http://127.0.0.1:")


def test_serving_the_world_without_a_key_is_warned_about(folder, capsys, monkeypatch):
    async def nothing(*arguments, **options):
        await asyncio.sleep(0)

    monkeypatch.setattr(server, "serve", nothing)
    monkeypatch.delenv("TURNGATE_API_KEY", raising=False)
    for host, is_warned in (("0.0.0.0", True), ("127.0.0.1", False)):
        assert cli.main(["serve", str(folder), "--host", host]) == 0
        assert ("without --api-key" in capsys.readouterr().err) == is_warned


def test_missing_folder_and_bad_port_are_explained_without_a_traceback(tmp_path, folder, capsys):
    assert cli.main(["serve", str(tmp_path / "nothing")]) == 2
    assert "config.json" in capsys.readouterr().err
    assert cli.main(["serve", str(folder), "--port", "70000"]) == 2
    assert "port must be in" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["", "checkpoints", "checkpoints/update-000050"])
def test_serving_a_run_names_the_model_folder_to_serve(tmp_path, capsys, asked):
    run = tmp_path / "run"
    checkpoints = [run / "checkpoints" / f"update-{update}" for update in ("000025", "000050")]
    for folder in (run, *checkpoints):  # a warm start may lie in the run folder as well
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "model.safetensors").touch()
    (run / "config.json").write_text("{}")
    assert cli.main(["serve", str(run / asked)]) == 2
    assert capsys.readouterr().err.endswith(f"; serve {run / 'checkpoints' / 'update-000050' / 'model'}\n")
