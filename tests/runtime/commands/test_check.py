import msgspec

from turngate.runtime import cli
from turngate.runtime.capabilities import Capabilities


def test_check_prints_the_table_and_writes_json(serve, tmp_path, capsys):
    server = serve()
    assert cli.main(["check", server.url, "--json", str(tmp_path / "found.json")]) == 0
    found = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Capabilities)
    assert capsys.readouterr().out == found.table() + "\n"
    assert found.chat.is_yes


def test_check_fails_on_a_server_that_cannot_chat(serve, capsys):
    assert cli.main(["check", serve(chat=False, completions=False).url]) == 1
    assert "/chat/completions must answer" in capsys.readouterr().out


def test_keys_come_from_files_or_the_environment(serve, tmp_path, capsys, monkeypatch):
    server = serve(api_key="secret-key")
    monkeypatch.delenv("TURNGATE_API_KEY", raising=False)
    assert cli.main(["check", server.url]) == 1
    assert "--api-key-file" in capsys.readouterr().err
    (tmp_path / "key").write_text("secret-key\n")
    assert cli.main(["check", server.url, "--api-key-file", str(tmp_path / "key")]) == 0
    monkeypatch.setenv("TURNGATE_API_KEY", "secret-key")
    assert cli.main(["check", server.url]) == 0
    (tmp_path / "key").write_text("two\nlines")
    assert cli.main(["check", server.url, "--api-key-file", str(tmp_path / "key")]) == 2
    assert cli.main(["check", server.url, "--api-key-file", str(tmp_path / "none")]) == 2


def test_nothing_there_and_no_url_are_explained_without_a_traceback(capsys):
    assert cli.main(["check", "http://127.0.0.1:1/v1"]) == 1
    assert "check that it is up" in capsys.readouterr().err
    assert cli.main(["check", "localhost:8000"]) == 2
    assert "http://" in capsys.readouterr().err
