"""Per-turn rewards beside the gold outcome: potentials, penalties, process scores. T counts turns here.

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
from turngate.learners.ratios import check_shapes
from turngate.runtime.errors import ConfigError, LearnerError, RecordError
from turngate.runtime.types import Trajectory

__all__ = [
    "ProcessForm",
    "RewardScheme",
    "TurnPenalties",
    "TurnRewards",
    "min_form",
    "observed_actions",
    "potential_shaping",
    "progress_form",
    "soft_overlong",
    "turn_penalties",
]

ProcessForm: TypeAlias = Literal["min", "progress", "sum"]
"""`min`: weighted so that the sum approaches the worst score. `progress`: differences, as a potential. `sum`: as it is,
which pays for more turns."""
PROCESS_FORMS: tuple[ProcessForm, ...] = ("min", "progress", "sum")


def potential_shaping(
    potentials_T: Tensor, *, gamma: float, terminated: bool, start: float = 0.0, is_own_T: Tensor | None = None
) -> Tensor:
    """Return gamma * Phi(h_{t+1}) - Phi(h_t) for each turn, shape (T,): it changes no ranking of policies.

    The discounted sum is gamma^T * Phi_T - Phi_0. The potential after a terminal turn counts as 0, whatever was given:
    otherwise it is a bonus for how the episode ended. Truncated episodes keep theirs, like a bootstrap value.
    Source: Ng et al. 1999; Grzes 2017 for episodic tasks.
    Args: potentials_T: Phi of the history after each turn; NaN where unknown. start: Phi before the first turn.
    is_own_T: False for turns that the policy did not take. They are part of the transition before them, without a
    discount of their own, and get gamma * (Phi_after - Phi_before): the two add up to the whole transition's shaping.
    """
    _check_gamma(gamma)
    after_T = _turn_values(potentials_T, "potentials")
    before_T = torch.cat([torch.tensor([start], dtype=torch.float64, device=after_T.device), after_T])[:-1]
    if terminated and len(after_T):
        after_T = torch.cat([after_T[:-1], torch.zeros_like(after_T[-1:])])
    shaping_T = gamma * after_T - before_T
    if is_own_T is not None:
        check_shapes(potentials=potentials_T, is_own=is_own_T)
        shaping_T = torch.where(is_own_T, shaping_T, gamma * (after_T - before_T))
    return shaping_T.to(potentials_T.dtype)


def progress_form(
    scores_T: Tensor, *, gamma: float = 1.0, terminated: bool, start: float = 0.0, is_own_T: Tensor | None = None
) -> Tensor:
    """Return by how much each turn moved a score of the history, shape (T,): potential-based shaping by that score.

    With the value of a prover policy as the score these are process advantages.
    Source: Setlur et al. 2024, PAV (2410.08146).
    """
    return potential_shaping(scores_T, gamma=gamma, terminated=terminated, start=start, is_own_T=is_own_T)


def min_form(scores_T: Tensor, *, temperature: float = 0.1) -> Tensor:
    """Return each score times its softmin weight, shape (T,): the sum approaches the smallest as temperature falls.

    A plain sum is maximised by many mediocre turns; an episode is as good as its worst turn. A NaN makes all NaN,
    because it could be the smallest.
    Source: Cheng et al. 2025, PURE (2504.15275).
    """
    if not temperature > 0:
        raise ConfigError(f"temperature must be positive: got {temperature} (min_form)")
    scores = _turn_values(scores_T, "scores")
    return (torch.softmax(-scores / temperature, dim=-1) * scores).to(scores_T.dtype)


def soft_overlong(lengths: Tensor, *, max_length: int, cache_length: int) -> Tensor:
    """Return 0 up to max_length - cache_length, then falling linearly to -1 at max_length, -1 beyond; same shape.

    Source: Yu et al. 2025, DAPO (2503.14476), eq. 13.
    Args: cache_length: width of the slope; 0 makes it a step beyond max_length.
    """
    if not 0 <= cache_length <= max_length:
        raise ConfigError(f"cache_length must be from 0 to max_length {max_length}: got {cache_length}")
    over = lengths.to(torch.float64) - (max_length - cache_length)
    slope = -over / cache_length if cache_length else -(over > 0).to(torch.float64)
    penalty = slope.clamp(-1.0, 0.0) + 0.0  # + 0.0 turns -0.0 into 0.0
    return penalty.to(lengths.dtype if lengths.is_floating_point() else torch.float64)


@dataclass(frozen=True, slots=True)
class TurnPenalties:
    """What each turn pays, by reason; float64 (T,), 0 or negative."""

    turn_T: Tensor
    invalid_T: Tensor
    repeat_T: Tensor
    total_T: Tensor
    """The sum of the three."""


def turn_penalties(
    is_invalid_T: Tensor,
    is_repeat_T: Tensor,
    *,
    turn_cost: float = 0.0,
    invalid_penalty: float = 0.0,
    repeat_penalty: float = 0.0,
    cap: float = float("inf"),
    is_own_T: Tensor | None = None,
) -> TurnPenalties:
    """Return what each turn pays; once an episode has paid `cap`, it pays no more.

    The turn that reaches the cap pays what is left of it, in proportion. Costs are given as positive numbers.
    Args: is_own_T: False for turns that the policy did not choose; they cost nothing.
    """
    check_shapes(is_invalid=is_invalid_T, is_repeat=is_repeat_T)
    own_T = torch.ones_like(is_invalid_T, dtype=torch.bool) if is_own_T is None else is_own_T
    check_shapes(is_invalid=is_invalid_T, is_own=own_T)
    costs_3T = torch.stack(
        [
            torch.full(own_T.shape, turn_cost, dtype=torch.float64, device=own_T.device),
            invalid_penalty * is_invalid_T.to(torch.float64),
            repeat_penalty * is_repeat_T.to(torch.float64),
        ]
    )
    costs_3T = torch.where(own_T, costs_3T, 0.0)
    due_T = costs_3T.sum(0)
    left_T = (cap - (due_T.cumsum(0) - due_T)).clamp(min=0.0)
    paid_T = torch.minimum(due_T, left_T)
    share_T = torch.where(due_T > 0, paid_T / due_T.clamp(min=1e-300), 0.0)
    turn_T, invalid_T, repeat_T = 0.0 - costs_3T * share_T
    return TurnPenalties(turn_T, invalid_T, repeat_T, total_T=0.0 - paid_T)


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
        _check_gamma(gamma)
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
        own_T = torch.tensor([turn.length > 0 for turn in trajectory.turns], dtype=torch.bool)
        if self.potential is not None:
            made[f"shaping_{self.potential}"] = self.potential_coef * potential_shaping(
                _scores(trajectory, self.potential),
                gamma=gamma,
                terminated=terminated,
                start=self.potential_start,
                is_own_T=own_T,
            )
        if self.process is not None:
            scores_T = _scores(trajectory, self.process)
            if self.process_form == "min":
                scores_T = min_form(scores_T, temperature=self.min_temperature)
            elif self.process_form == "progress":
                scores_T = progress_form(
                    scores_T, gamma=gamma, terminated=terminated, start=self.process_start, is_own_T=own_T
                )
            made[f"process_{self.process}"] = self.process_coef * scores_T
        return made


def observed_actions(trajectory: Trajectory) -> list[ObservedAction]:
    """Return a trajectory's turns as detectors take them."""
    observation: str | None = None
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


def _turn_values(values_T: Tensor, what: str) -> Tensor:
    """Return one value per turn in float64; NaN stands for unknown, infinity for a mistake."""
    if values_T.ndim != 1 or not values_T.is_floating_point():
        raise LearnerError(f"{what} must be one float per turn: got {values_T.dtype} {tuple(values_T.shape)}")
    if values_T.isinf().any():
        raise LearnerError(f"{what} must be finite: got {values_T.tolist()}; fix what scores the turns")
    return values_T.detach().to(torch.float64)


def _check_gamma(gamma: float) -> None:
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma must be from 0 to 1: got {gamma}")
