"""What a learner makes of an episode's rewards and scores, turn by turn. T counts turns here.

The environment's components and the scorers' judgements stay as they are on the record; `RewardScheme` combines them,
purely, into what one learner learns from. Gold returns and evaluations read the record and never see the result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from turngate.envs.base import Action, End
from turngate.envs.detectors import Detector, ObservedAction, invalid_actions, repeated_actions
from turngate.learners.advantages.gae import check_discounts
from turngate.learners.shaping import min_form, potential_shaping, progress_form, soft_overlong, turn_penalties
from turngate.runtime.errors import ConfigError, LearnerError, RecordError
from turngate.runtime.types import Trajectory

__all__ = ["ProcessForm", "RewardScheme", "TurnRewards", "observed_actions"]

ProcessForm: TypeAlias = Literal["min", "progress", "sum"]
"""`min`: weighted so that the sum approaches the worst score. `progress`: differences, as a potential. `sum`: as it is,
which pays for more turns."""
PROCESS_FORMS: tuple[ProcessForm, ...] = ("min", "progress", "sum")


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """What a learner learns from in one trajectory."""

    total_T: Tensor
    """float64 (T,); NaN at turns that lack a score they need."""
    components: dict[str, Tensor]
    """The same by name, weights and coefficients applied; float64 (T,) each. They add up to `total_T`."""

    @property
    def is_scorable(self) -> bool:
        """False when a needed score is missing: leave the trajectory out, a silent 0 would be a verdict."""
        return not bool(self.total_T.isnan().any())


@dataclass(frozen=True, kw_only=True)
class RewardScheme:
    """What a learner makes of a trajectory's rewards and scores. Picklable; the default is what the environment gave.

    Raises: ConfigError: the parts cannot work together.
    """

    weights: Mapping[str, float] | None = None
    """Weight of each component of the environment; None takes all of them as they are. Names left out count 0."""
    once: tuple[str, ...] = ()
    """Components that count only where an episode earns them first, for rewards of form: paid every turn they are
    farmed by taking more turns."""
    turn_cost: float = 0.0
    invalid_penalty: float = 0.0
    repeat_penalty: float = 0.0
    """Costs, as positive numbers: of a turn, of an action the environment could not read, of one done before after
    the same observation."""
    penalty_cap: float = 0.5
    """The three together, per episode: below the 1 of a success, so that no success is worth less than a failure."""
    potential: str | None = None
    """Name of the score whose differences are paid, as potential-based shaping."""
    potential_coef: float = 1.0
    potential_start: float = 0.0
    """The potential before the first turn, where no scorer looks."""
    process: str | None = None
    """Name of the score that judges each turn."""
    process_form: ProcessForm = "min"
    process_coef: float = 1.0
    process_start: float = 0.0
    """The score before the first turn; read by `progress` alone."""
    min_temperature: float = 0.1
    overlong_tokens: int | None = None
    """Generated tokens per episode from which on the whole overlong penalty is due; None leaves it off."""
    overlong_cache_tokens: int = 0
    """Width of the slope below that."""
    overlong_coef: float = 1.0
    invalid_detector: Detector = invalid_actions
    repeat_detector: Detector = repeated_actions

    def __post_init__(self) -> None:
        weights = {} if self.weights is None else self.weights
        for name, value in [*self._numbers(), *((f"weights[{n!r}]", w) for n, w in weights.items())]:
            if not -float("inf") < value < float("inf"):
                raise ConfigError(f"{name} must be finite: got {value} (RewardScheme)")
        once: object = self.once
        if isinstance(once, str):  # a collection of names, too, of one letter each
            raise ConfigError(f"once must be a tuple of names: got {once!r} (RewardScheme); a comma makes it one")
        for name in ("turn_cost", "invalid_penalty", "repeat_penalty", "penalty_cap", "overlong_coef"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more: got {getattr(self, name)} (RewardScheme); it is a cost")
        if not self.min_temperature > 0:
            raise ConfigError(f"min_temperature must be positive: got {self.min_temperature} (RewardScheme)")
        if self.overlong_tokens is not None and not 0 <= self.overlong_cache_tokens <= self.overlong_tokens:
            raise ConfigError(
                f"overlong_cache_tokens must be from 0 to overlong_tokens {self.overlong_tokens}: "
                f"got {self.overlong_cache_tokens} (RewardScheme)"
            )
        self._check_process()

    def _numbers(self) -> list[tuple[str, float]]:
        names = (
            "turn_cost", "invalid_penalty", "repeat_penalty", "penalty_cap", "potential_coef", "potential_start",
            "process_coef", "process_start", "min_temperature", "overlong_coef",
        )  # fmt: skip
        return [(name, float(getattr(self, name))) for name in names]

    def _check_process(self) -> None:
        if "" in (self.potential, self.process):
            raise ConfigError("potential and process must name a score: got ''; None leaves it off (RewardScheme)")
        form: str = self.process_form
        if form not in PROCESS_FORMS:
            why = "; a product of scores punishes every turn, however good" if form == "product" else ""
            raise ConfigError(f"process_form must be min, progress or sum: got {form!r}{why}")
        if (self.process or self.potential) and self.weights is not None and not self.weights.get("outcome", 0.0) > 0:
            raise ConfigError(
                "scores must be mixed with the verified outcome: got no positive weights['outcome'] beside "
                f"process={self.process!r}, potential={self.potential!r} (RewardScheme); a policy learns what a judge "
                "likes instead of the task, most of all from a sum over turns (PURE, 2504.15275); weigh `outcome`"
            )

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores that must be on each turn."""
        return tuple(dict.fromkeys(name for name in (self.potential, self.process) if name is not None))

    @property
    def is_plain(self) -> bool:
        """True when the rewards are the environment's own, untouched."""
        return self == RewardScheme()

    def rewards(self, trajectory: Trajectory, *, gamma: float) -> TurnRewards:
        """Return the rewards of each turn, in total and by component.

        Components of the environment keep their names; those made here are `penalty_turn`, `penalty_invalid`,
        `penalty_repeat`, `penalty_overlong`, `shaping_<score>` and `process_<score>`, present when switched on.
        Args: gamma: the learner's discount per turn, which shaping must share to change no ranking.
        Raises: RecordError: a reward is infinite, or the environment uses a name of ours.
        """
        check_discounts(gamma=gamma)
        given = self._given(trajectory)
        made = self._penalties(trajectory) | self._scored(trajectory, gamma)
        if shared := sorted(given.keys() & made.keys()):
            raise RecordError(
                f"reward components must not be named as a learner's: got {shared} (trajectory {trajectory.id}); "
                "rename them in the environment"
            )
        components = given | made
        total_T = torch.zeros(len(trajectory.turns), dtype=torch.float64)
        for values_T in components.values():
            total_T = total_T + values_T
        if total_T.isinf().any():
            raise RecordError(
                f"reward must be finite: got {total_T.tolist()} (trajectory {trajectory.id}); fix the environment"
            )
        return TurnRewards(total_T, components)

    def absent(self, trajectories: Iterable[Trajectory]) -> tuple[str, ...]:
        """Return the components and scores this scheme relies on that no turn of all these trajectories has.

        When a whole batch lacks a name it may be misspelt, or no scorer of that name runs. Components are only missed
        once an episode has succeeded: environments may pay nothing, rather than 0, until then.
        """
        episodes = tuple(trajectories)
        components = ({"outcome"} if self.scores else set[str]()) | set(self.once) | set(self.weights or ())
        if not any(trajectory.end is End.success for trajectory in episodes):
            components = set[str]()
        turns = [turn for trajectory in episodes for turn in trajectory.turns]
        paid = {name for turn in turns for name in turn.rewards}
        scored = {name for turn in turns for name in turn.scores}
        return tuple(sorted((components - paid) | (set(self.scores) - scored)))

    @property
    def adds_rewards(self) -> bool:
        """True when something is paid beside the environment's own components: costs, potentials or judgements."""
        costs = self.turn_cost or self.invalid_penalty or self.repeat_penalty or self.overlong_tokens is not None
        return bool(costs or self.shaped_by or (self.process and self.process_coef))

    @property
    def shaped_by(self) -> tuple[str, ...]:
        """The settings in use that pay differences of a score, and so need one discount per turn."""
        by_potential = (f"potential={self.potential!r}",) if self.potential and self.potential_coef else ()
        is_progress = self.process and self.process_form == "progress" and self.process_coef
        return by_potential + ((f"process={self.process!r} as progress",) if is_progress else ())

    @property
    def trajectory_noop(self) -> str:
        """Why credit per trajectory cannot use this scheme's shaping; empty when there is nothing to say.

        Shaping telescopes: at gamma 1 it adds the same -Phi(h_0) to every sibling's return, and a group baseline takes
        it out again.
        """
        if not self.shaped_by:
            return ""
        return (
            f"{' and '.join(self.shaped_by)} adds up to the same number in every sibling's return, so advantages per "
            "trajectory do not change; use credit per turn (PPO, step groups), or process_form='min'"
        )

    def _given(self, trajectory: Trajectory) -> dict[str, Tensor]:
        names = dict.fromkeys(name for turn in trajectory.turns for name in turn.rewards)
        components: dict[str, Tensor] = {}
        for name in names:
            if self.weights is not None and name not in self.weights:
                continue
            paid = [turn.rewards.get(name, 0.0) for turn in trajectory.turns]
            if name in self.once:
                first = next((t for t, value in enumerate(paid) if value), 0)
                paid = [value if t == first else 0.0 for t, value in enumerate(paid)]
            weight = 1.0 if self.weights is None else self.weights[name]
            components[name] = weight * torch.tensor(paid, dtype=torch.float64)
        return components

    def _penalties(self, trajectory: Trajectory) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        if self.turn_cost or self.invalid_penalty or self.repeat_penalty:
            steps = observed_actions(trajectory)
            paid = turn_penalties(
                _flags(self.invalid_detector, steps, "invalid_detector"),
                _flags(self.repeat_detector, steps, "repeat_detector"),
                turn_cost=self.turn_cost,
                invalid_penalty=self.invalid_penalty,
                repeat_penalty=self.repeat_penalty,
                cap=self.penalty_cap,
                is_own_T=torch.tensor([not turn.injected for turn in trajectory.turns], dtype=torch.bool),
            )
            named = {"turn": (self.turn_cost, paid.turn_T), "invalid": (self.invalid_penalty, paid.invalid_T)}
            named["repeat"] = (self.repeat_penalty, paid.repeat_T)
            made |= {f"penalty_{name}": values_T for name, (cost, values_T) in named.items() if cost}
        if self.overlong_tokens is not None and trajectory.turns:
            overlong_T = torch.zeros(len(trajectory.turns), dtype=torch.float64)
            length = torch.tensor([trajectory.policy_tokens])
            overlong_T[-1:] = self.overlong_coef * soft_overlong(
                length, max_length=self.overlong_tokens, cache_length=self.overlong_cache_tokens
            )
            made["penalty_overlong"] = overlong_T
        return made

    def _scored(self, trajectory: Trajectory, gamma: float) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        terminated = trajectory.end.is_terminal
        # An episode that began in a state somebody else reached starts from what that state was worth.
        known = dict(trajectory.restarted_from.scores) if trajectory.restarted_from is not None else {}
        own_T = torch.tensor([turn.length > 0 for turn in trajectory.turns], dtype=torch.bool)
        if self.potential is not None:
            made[f"shaping_{self.potential}"] = self.potential_coef * potential_shaping(
                _scores(trajectory, self.potential),
                gamma=gamma,
                terminated=terminated,
                start=known.get(self.potential, self.potential_start),
                is_own_T=own_T,
            )
        if self.process is not None:
            scores_T = _scores(trajectory, self.process)
            if self.process_form == "min":
                scores_T = min_form(scores_T, temperature=self.min_temperature)
            elif self.process_form == "progress":
                start = known.get(self.process, self.process_start)
                scores_T = progress_form(scores_T, gamma=gamma, terminated=terminated, start=start, is_own_T=own_T)
            made[f"process_{self.process}"] = self.process_coef * scores_T
        return made


def observed_actions(trajectory: Trajectory) -> list[ObservedAction]:
    """Return a trajectory's turns as detectors take them."""
    observation = trajectory.first_observation
    steps: list[ObservedAction] = []
    for turn in trajectory.turns:
        steps.append(ObservedAction(observation, Action(turn.text, turn.tool_calls), turn.valid))
        observation = turn.observation
    return steps


def _flags(detector: Detector, steps: Sequence[ObservedAction], what: str) -> Tensor:
    flags = [bool(flag) for flag in detector(steps)]
    if len(flags) != len(steps):
        raise LearnerError(f"{what} must answer for each action: expected {len(steps)} flags, got {len(flags)}")
    return torch.tensor(flags, dtype=torch.bool)


def _scores(trajectory: Trajectory, name: str) -> Tensor:
    scores_T = torch.tensor([turn.scores.get(name, float("nan")) for turn in trajectory.turns], dtype=torch.float64)
    if scores_T.isinf().any():
        raise RecordError(f"scores must be finite: got {name}={scores_T.tolist()} (trajectory {trajectory.id})")
    return scores_T
