"""For tests of agents, endpoints and runtimes: virtual time, fakes, a hostile server, cancellation at every await."""

from turngate.runtime.testing.cancellation import Outcome, cancel_at_every_tick, cancel_everywhere
from turngate.runtime.testing.endpoints import FakeEndpoint, FakeTransport, render_ids
from turngate.runtime.testing.fake_server import FakeServer, Traits
from turngate.runtime.testing.hostile import HostileServer
from turngate.runtime.testing.renderers import FakeRenderer
from turngate.runtime.testing.virtual_time import VirtualTimeLoop, run_virtual

__all__ = [
    "FakeEndpoint",
    "FakeRenderer",
    "FakeServer",
    "FakeTransport",
    "HostileServer",
    "Outcome",
    "Traits",
    "VirtualTimeLoop",
    "cancel_at_every_tick",
    "cancel_everywhere",
    "render_ids",
    "run_virtual",
]
