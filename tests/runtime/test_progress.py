import io

from turngate.runtime.events import EvaluationFinished, Events, UpdateFinished
from turngate.runtime.progress import show_progress

METRICS = {
    "update": 10.0,
    "success": 0.5,
    "lag_mean": 0.75,
    "lag_max": 2.0,
    "episodes_per_s": 12.34,
    "policy_tokens_per_s": 987.0,
    "learner_busy_share": 0.5,
    "slots_busy_share": 0.914,
}


def test_every_nth_update_and_every_evaluation_is_a_line() -> None:
    events, out = Events(), io.StringIO()
    show_progress(events, every=5, file=out)
    assert events.update_finished is not None
    assert events.evaluation_finished is not None
    for version in range(1, 11):
        events.update_finished(UpdateFinished(version, {**METRICS, "update": float(version)}, 0.1))
    events.evaluation_finished(EvaluationFinished("after", 10, 512, 470, 0.9, 6.04))
    assert out.getvalue().splitlines() == [
        "update    5  success 0.50  lag 0.8/2   12.3 episodes/s     987 tokens/s  learner  50%  slots  91%",
        "update   10  success 0.50  lag 0.8/2   12.3 episodes/s     987 tokens/s  learner  50%  slots  91%",
        "after: success 0.918 on 512 episodes in 6.0 s",
    ]
