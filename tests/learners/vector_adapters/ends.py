"""Section 3.5: what the end of an episode means to a critic and to a group."""

from tests.learners.vector_adapters.case import Adapter, Case, Values
from turngate.envs.base import End
from turngate.learners.voting import critic_handling, group_handling

ENDS = {
    "success": End.success,
    "failure": End.failure,
    "budget_is_failure": End.budget,
    "max_turns_collector": End.turn_limit,
    "max_tokens": End.token_limit,
    "wall_timeout": End.timeout,
    "context_overflow": End.context_overflow,
    "cancelled_stale": End.cancelled,
    "env_crash": End.env_error,
    "infrastructure_error": End.endpoint_error,
}


def end_reason(case: Case) -> Values:
    ends = [ENDS[reason] for reason in case.inputs["reasons"]]
    return {
        "terminated": [end.is_terminal for end in ends],
        "critic_handling": [critic_handling(end) for end in ends],
        "group_handling_without_critic": [group_handling(end) for end in ends],
    }


ADAPTERS: dict[str, Adapter] = {"end_reason": end_reason}
