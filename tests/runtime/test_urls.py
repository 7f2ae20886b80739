"""URLs that say who we are."""

import pytest

from turngate.runtime.critic_q import CriticQ
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import ConfigError, PublishError
from turngate.runtime.publishers import EnginePublisher
from turngate.runtime.publishers.admin import Admin
from turngate.runtime.transport import HttpTransport
from turngate.runtime.urls import credentials, shown_url


@pytest.mark.parametrize(
    ("url", "shown", "secrets"),
    [
        ("http://host:8000/v1/", "http://host:8000/v1", ()),
        ("http://me@host/v1", "http://me@host/v1", ()),
        ("http://me:p%40ss@host/v1", "http://host/v1", ("p%40ss", "p@ss", "me:p%40ss")),
    ],
)
def test_a_password_is_not_shown_and_is_a_secret_in_every_spelling(url, shown, secrets):
    assert (shown_url(url), credentials(url, None)) == (shown, ({}, secrets))


def test_nothing_that_connects_shows_a_password():
    url = "http://me:hunter2@127.0.0.1:9/v1"
    for one in (HttpTransport(url), CriticQ(url), Endpoint(url, model="m"), EnginePublisher(url)):
        assert "hunter2" not in repr(one)
        assert "127.0.0.1:9" in repr(one)


@pytest.mark.parametrize("made", [HttpTransport, CriticQ, EnginePublisher])
def test_a_url_that_cannot_work_is_refused_without_its_password(made):
    with pytest.raises(ConfigError, match="ftp://host") as caught:
        made("ftp://me:hunter2@host/v1")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("made", [CriticQ, EnginePublisher])
def test_what_is_no_url_is_refused_as_such(made):
    with pytest.raises(ConfigError, match="url must be"):
        made("http://host:eight/v1")


@pytest.mark.parametrize("made", [CriticQ, EnginePublisher])
def test_a_key_beside_a_password_is_refused(made):
    with pytest.raises(ConfigError, match="api_key must not come with a name and password"):
        made("http://me:hunter2@host/v1", api_key="key")


async def test_a_control_route_that_does_not_answer_is_named_without_the_password():
    with pytest.raises(PublishError, match=r"GET http://127\.0\.0\.1:9/health must answer") as caught:
        await Admin("http://me:hunter2@127.0.0.1:9/v1", api_key=None).get("/health")
    assert "hunter2" not in str(caught.value)
