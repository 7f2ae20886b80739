"""URLs that say who we are."""

import pytest

from turngate.runtime.critic_q import CriticQ
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.transport import HttpTransport
from turngate.runtime.urls import shown_url, url_secrets


@pytest.mark.parametrize(
    ("url", "shown", "secrets"),
    [
        ("http://host:8000/v1/", "http://host:8000/v1", ()),
        ("http://me@host/v1", "http://me@host/v1", ()),
        ("http://me:p%40ss@host/v1", "http://host/v1", ("p%40ss", "p@ss", "me:p%40ss")),
    ],
)
def test_a_password_is_not_shown_and_is_a_secret_in_every_spelling(url, shown, secrets):
    assert (shown_url(url), url_secrets(url)) == (shown, secrets)


def test_nothing_that_connects_shows_a_password():
    url = "http://me:hunter2@127.0.0.1:9/v1"
    for one in (HttpTransport(url), CriticQ(url), Endpoint(url, model="m")):
        assert "hunter2" not in repr(one)
        assert "127.0.0.1:9" in repr(one)
