"""Learning rates that decay by tokens, for steps with different numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from te_transform.graph.keywords import suggests
from te_transform.training.counts import is_count
from te_transform.training.length_schedule import CurriculumError, check_count


class CountsTokens(Protocol):
    """A SequenceCurriculum, or another object with the number of past tokens."""

    @property
    def tokens(self) -> int:
        """The number of past tokens."""
        ...


def _are_rates(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(rate, (int, float)) for rate in value)


_is_past = partial(is_count, least=0)
_STATE_CHECKS: dict[str, Callable[[Any], bool]] = {
    "tokens": _is_past,
    "start": lambda value: isinstance(value, int),
    "steps": _is_past,
    "ticks": _is_past,
    "rates": _are_rates,
    "scheduler": lambda value: isinstance(value, dict),
}


class TokenSchedule(LRScheduler):
    """A torch scheduler that steps once per number of tokens. The warm-up of the rate counts optimizer steps.

        cosine = CosineAnnealingLR(optimizer, 3000)
        scheduler = TokenSchedule(cosine, tokens_per_step=2**19, source=curriculum)
        scheduler.step()  # after each step of the optimizer

    This schedule ends after 3000 * 2**19 tokens, in any number of steps.
    """

    @suggests
    def __init__(
        self,
        scheduler: LRScheduler,
        tokens_per_step: int,
        *,
        warmup_steps: int = 0,
        source: CountsTokens | None = None,
    ) -> None:
        """Make `scheduler` count tokens.

        Args:
            scheduler: a scheduler that counts its calls. No other code may step it from now on.
            tokens_per_step: the number of tokens per step of `scheduler`: a step with full sequences, over
                all ranks.
            warmup_steps: the number of optimizer steps in which learning rates grow linearly. Step n has
                n / warmup_steps of the scheduler's rate.
            source: the object that counts tokens; None if step() receives their number.

        Raises:
            CurriculumError: the value of an argument is invalid. Learning rates are unchanged.
        """
        if not isinstance(scheduler, LRScheduler) or isinstance(
            scheduler, (ReduceLROnPlateau, TokenSchedule)
        ):
            raise CurriculumError(
                f"expected a torch scheduler that counts steps, got a {type(scheduler).__name__}; step that "
                "beside the optimizer, or pass a torch.optim.lr_scheduler.LRScheduler"
            )
        check_count("tokens_per_step", tokens_per_step)
        if warmup_steps != 0:
            check_count("warmup_steps", warmup_steps)
        if source is not None and not hasattr(source, "tokens"):
            raise CurriculumError(
                f"expected a source with the number of tokens, got a {type(source).__name__}; pass the "
                "SequenceCurriculum, or None and call step(tokens)"
            )
        # not LRScheduler.__init__(), which would step: this counts for `scheduler`
        self.scheduler, self.source = scheduler, source
        self.tokens_per_step, self.warmup_steps = tokens_per_step, warmup_steps
        self.tokens = source.tokens if source is not None else 0
        self.start = self.tokens  # the number of tokens before the first step of `scheduler`
        self.steps = self.ticks = 0  # past optimizer steps, and past steps of `scheduler`
        self._rates = self.get_last_lr()
        self._set_rates()

    @property
    def optimizer(self) -> Any:
        """The scheduler's optimizer."""
        return self.scheduler.optimizer

    def step(self, tokens: int | None = None) -> None:
        """Count one optimizer step with `tokens` tokens, or None for the new tokens of the source.

        Without new tokens, a call counts nothing: accelerate calls this method once per process.

        Raises:
            CurriculumError: `tokens` is invalid, or missing without a source. The optimizer has new groups.
        """
        if tokens is not None:
            check_count("tokens", tokens)
        self._check_groups(self._rates)
        new = self._new_tokens() if tokens is None else tokens
        if not new:
            return
        self.tokens, self.steps = self.tokens + new, self.steps + 1
        due = (self.tokens - self.start) // self.tokens_per_step
        if due > self.ticks:
            self._set_rates(warm=False)  # some schedulers compute the next rate from this one
            for _ in range(due - self.ticks):
                self.scheduler.step()
            self.ticks, self._rates = due, self.get_last_lr()
        self._set_rates()

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates of the optimizer's groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the state of the scheduler."""
        rates, scheduler = [float(rate) for rate in self._rates], self.scheduler.state_dict()
        counts = {"tokens": self.tokens, "start": self.start, "steps": self.steps, "ticks": self.ticks}
        return counts | {"rates": rates, "scheduler": scheduler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from state_dict(). The optimizer has a state of its own.

        Raises:
            CurriculumError: the state does not come from a TokenSchedule, or from one of other groups.
        """
        known = state if isinstance(state, dict) else {}
        if missing := [name for name, is_valid in _STATE_CHECKS.items() if not is_valid(known.get(name))]:
            raise CurriculumError(
                f"expected a state of TokenSchedule.state_dict(), got one without {', '.join(missing)}; pass "
                "the state that was saved for the schedule"
            )
        self._check_groups(state["rates"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.tokens, self.start, self.steps, self.ticks, rates, _ = (state[name] for name in _STATE_CHECKS)
        self._rates = list(rates)
        self._set_rates()

    def _new_tokens(self) -> int:
        """Return the number of tokens that the source has counted since the last step."""
        if self.source is None:
            raise CurriculumError(
                "expected a number of tokens, got none; call step(tokens), or pass source=curriculum"
            )
        if self.source.tokens < self.tokens:  # the source counts again from 0
            self.start, self.tokens = self.start - self.tokens, 0
        return self.source.tokens - self.tokens

    def _check_groups(self, rates: list[Any]) -> None:
        """Raise unless there is a rate for each group of the optimizer."""
        if len(rates) != len(groups := self.optimizer.param_groups):
            raise CurriculumError(
                f"expected the {len(rates)} parameter groups of the schedule, got an optimizer of "
                f"{len(groups)}; add all groups before you make the schedule"
            )

    def _set_rates(self, warm: bool = True) -> None:
        """Set the scheduler's rates, multiplied by the progress of the warm-up if `warm`."""
        part = min(1.0, (self.steps + 1) / self.warmup_steps) if self.warmup_steps and warm else 1.0
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            _assign(group, rate * part)


def _assign(group: dict[str, Any], rate: float) -> None:
    """Set a learning rate. A rate that is a tensor is filled, because CUDA graphs read it."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
