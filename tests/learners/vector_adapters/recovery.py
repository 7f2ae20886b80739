"""Section 8: mistakes and recoveries, and which states are worth starting from again."""

from tests.learners.vector_adapters.case import Adapter, Case, Values
from turngate.learners.recovery import PlayedEpisode, beta_learnability, recovery_metrics, restart_weights


def recovery(case: Case) -> Values:
    episodes = [
        PlayedEpisode(
            success=episode["success"],
            values=tuple(episode.get("v", ())),
            flags=tuple(map(bool, episode.get("mistakes", ()))),
            injected=tuple(map(bool, episode.get("injected", ()))),
        )
        for episode in case.inputs["episodes"]
    ]
    found = recovery_metrics(episodes, tau=case.params.get("tau", 0.0))
    per_episode = [
        {"mistakes": list(f.mistakes), "latency": list(f.latency), "success": episode.success}
        for episode, f in zip(episodes, found.per_episode, strict=True)
    ]
    return {
        "per_episode": per_episode,
        "mistake_rate_per_turn": found.mistake_rate_per_turn,
        "state_recovery_rate": found.state_recovery_rate,
        "episode_recovery_rate": found.episode_recovery_rate,
        "clean_success_rate": found.clean_success_rate,
        "mean_latency": found.mean_latency,
    }


def weights(case: Case) -> Values:
    return {"weights": restart_weights(case.real("success_rate").tolist(), floor=case.params["floor"])}


def posterior(case: Case) -> Values:
    counts = zip(case.inputs["successes"], case.inputs["tries"], strict=True)
    return {"e_p_1mp": [beta_learnability(s, n, a=case.params["a"], b=case.params["b"]) for s, n in counts]}


ADAPTERS: dict[str, Adapter] = {
    "recovery_metrics": recovery,
    "restart_weights": weights,
    "restart_weights_beta": posterior,
}
