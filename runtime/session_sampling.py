"""How the replies of a session are drawn, and whether such replies can be trained on."""

import msgspec

from turngate.runtime.types import Sampling

__all__ = ["allowed_sampling", "why_not_trained"]


def allowed_sampling(asked: Sampling | None, pinned: Sampling | None, tokens_left: int | None) -> Sampling:
    """Return how a request is drawn: what is pinned before what the agent asks for, within the tokens left.

    `max_tokens` and `stop` are the agent's choice even when the rest is pinned: they end a turn, they do not change
    what its tokens are drawn from.
    """
    if asked is None or pinned is None:
        drawn = asked or pinned or Sampling()
    else:
        drawn = msgspec.structs.replace(pinned, max_tokens=asked.max_tokens, stop=asked.stop)
    if tokens_left is None or tokens_left >= drawn.max_tokens:
        return drawn
    return msgspec.structs.replace(drawn, max_tokens=max(1, tokens_left))


def why_not_trained(sampling: Sampling | None) -> str:
    """Say why the log-probs of a reply drawn so, as its agent chose, are not the policy's; empty when they are."""
    if sampling is None:
        return "nobody said how the reply was drawn"
    if (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0):
        return ""
    return (
        f"the agent drew at temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}: "
        "expected 1, 1, 0; let the session pin its sampling, as `turngate gateway --temperature 1` does"
    )
