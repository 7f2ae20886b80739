"""What an update reports about its batch, all panels at once; `docs/metrics.md` lists the numbers."""

import logging
import math

from turngate.learners.hacking import ALARMS, HackingMonitor
from turngate.learners.panels_batch import PanelInput, group_panel, lag_panel, outcome_panel, policy_panel
from turngate.learners.panels_credit import credit_panel

__all__ = ["PanelInput", "compute_panels", "watch_rewards"]

_log = logging.getLogger("turngate.learner")


def compute_panels(data: PanelInput) -> dict[str, float]:
    """Return every panel of one update."""
    return outcome_panel(data) | group_panel(data) | lag_panel(data) | policy_panel(data) | credit_panel(data)


def watch_rewards(monitor: HackingMonitor, data: PanelInput, *, kl: float | None) -> dict[str, float]:
    """Show the monitor one update and return what it says; alarms that were off before are logged as warnings."""
    pairs = zip(data.trajectories, data.rewards, strict=True)
    # A scheme may leave the outcome out, so that an episode whose outcome is unknown still trains: no gold, no say.
    known = [(t, r) for t, r in pairs if r is not None and math.isfinite(t.outcome)]
    before = set(monitor.alarms)
    metrics = monitor.update([t for t, _ in known], [r for _, r in known], kl=kl)
    for name in monitor.alarms.keys() - before:
        _log.warning("reward hacking? %s: %s (%s)", name, ALARMS[name], monitor.alarms[name])
    return metrics
