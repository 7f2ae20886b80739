import pytest

from turngate.runtime import cli


def test_no_command_shows_the_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert "usage: turngate" in capsys.readouterr().err
