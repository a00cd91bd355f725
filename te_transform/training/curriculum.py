"""A curriculum of sequence lengths: training begins with short sequences, which grow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.utils.data import default_collate, get_worker_info

from te_transform.graph.keywords import suggests
from te_transform.training.cut_batch import Cutter, Dims, tensors
from te_transform.training.epoch_position import EpochPosition, keeps_position
from te_transform.training.length_schedule import CurriculumError, check_count, length_schedule

log = logging.getLogger(__name__)
COUNTS = ("step", "tokens", "batches", "epoch_batches", "length")  # of a state


class SequenceCurriculum:
    """A loader whose sequences grow with the steps or tokens of training (arXiv 2108.06084).

        curriculum = SequenceCurriculum(loader, max_length=1024, total_steps=3000)
        for batch in curriculum:
            ...

    A batch is cut in the process that trains, when it leaves the loader. Its place in the order of batches
    decides its length, so workers and pinned memory may run ahead. Other attributes are the loader's.
    """

    @suggests
    def __init__(
        self,
        loader: Iterable[Any] | None = None,
        *,
        max_length: int,
        total_steps: int | None = None,
        total_tokens: int | None = None,
        min_length: int | None = None,
        schedule: str | Mapping[int, int] = "linear",
        bucket: int = 64,
        reshape: bool = False,
        longest_first: bool = True,
        accumulation: int = 1,
        ranks: int | None = None,
        inputs: str | int | None = None,
        dims: Dims | None = None,
    ) -> None:
        """Set up a curriculum; nothing of `loader` is read.

        Args:
            loader: a DataLoader or any iterable of batches; what accelerate's prepare() returned, not what it
                was given. None for collate(), cut() and CurriculumCallback.
            max_length: the length of the loader's sequences, in tokens, and of the curriculum's end.
            total_steps: optimizer steps until max_length is reached; or
            total_tokens: tokens until then, counted in positions, padding included, over all ranks.
            min_length: of the first steps, a multiple of `bucket`, which it defaults to.
            schedule: "linear"; "root", which grows by the square root; or for a discrete one a mapping from
                the step or token to the length from there on.
            bucket: lengths are multiples of it; 64 suits FP8 and CUDA graphs, 8 suits eager bf16.
            reshape: True if the tokens behind the length become more rows, False if they are dropped.
            longest_first: True if the first step of training has max_length, to reserve the memory for it.
            accumulation: batches per optimizer step; all of a step have the same length.
            ranks: data-parallel processes, for total_tokens; None for all of torch.distributed's.
            inputs: the key or index of the inputs in a batch; None for "input_ids", or the first tensor of
                [batch, sequence].
            dims: sequence dimensions of tensors by key or index, where sizes do not tell them; () leaves a
                tensor alone.

        Raises:
            CurriculumError: an argument has a value that it cannot have, alone or next to the others.
        """
        by_tokens = total_tokens is not None
        if (total_steps is None) != by_tokens:
            raise CurriculumError(
                f"expected either total_steps or total_tokens, got total_steps={total_steps!r} and "
                f"total_tokens={total_tokens!r}; pass the one in which the curriculum is to be measured"
            )
        if loader is not None and not isinstance(loader, Iterable):
            raise CurriculumError(
                f"expected a loader, an iterable of batches, got a {type(loader).__name__}; pass a function "
                "that collates to collate()"
            )
        total = total_tokens if total_steps is None else total_steps
        check_count("total_tokens" if by_tokens else "total_steps", total)
        check_count("accumulation", accumulation)
        if ranks is not None:
            check_count("ranks", ranks)
        lengths = length_schedule(min_length, max_length, total, schedule, bucket)
        self.schedule = replace(lengths, by_tokens=by_tokens, longest_first=longest_first)
        self.cutter = Cutter(max_length, reshape, inputs, dict(dims or {}))
        self.accumulation, self.loader, self._ranks = accumulation, loader, ranks
        self.length = self.schedule.length_at(0)
        self.step = 0  # optimizer steps whose batches have all been handed out
        self.tokens = 0  # positions handed out so far, over all ranks
        self.batches = 0  # batches of the current step handed out so far
        self._epoch = EpochPosition()
        log.info("%r", self)

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths that batches can have, ascending: as many captures, compilations or CUDA graphs."""
        return self.schedule.lengths

    def cut(self, batch: Any) -> Any:
        """Return the next batch of training, cut to its length: contiguous, and pinned if it was.

        Raises:
            CurriculumError: the batch has no inputs of [batch, sequence], other labels, or tensors whose
                sequence dimension is not clear. The curriculum is where it was then.
        """
        length = self.length if self.batches else self.schedule.length_at(self._position)
        if not self.cutter.reshape:
            self._check_padding(batch)
        result, positions = self.cutter.cut(batch, length)
        if length != self.length:
            log.info("sequences of %d tokens from step %d on", length, self.step)
        self.length = length
        self.tokens += positions * self.ranks
        self.batches += 1
        if self.batches == self.accumulation:
            self.end_step()
        return result

    def end_step(self) -> None:
        """End an optimizer step that has fewer batches than `accumulation`, as the last of an epoch may."""
        if self.batches:
            self.step, self.batches = self.step + 1, 0

    def collate(self, function: Callable[[Any], Any] = default_collate) -> Callable[[Any], Any]:
        """Return a collate_fn that cuts what `function` returns, for a training loader without workers.

        Raises:
            CurriculumError: when it is called in a worker, which cannot know the place of its batches.
        """
        return _Collate(self, function)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in training, and the loader's state if it has one."""
        state = {"step": self.step, "tokens": self.tokens, "batches": self.batches, "length": self.length}
        loader = self.loader.state_dict() if keeps_position(self.loader) else None
        return state | {"epoch_batches": self._epoch.batches, "loader": loader}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from state_dict(): a loader without a state skips the batches that the epoch has had.

        Raises:
            CurriculumError: the state is not one of a curriculum.
        """
        if missing := [name for name in COUNTS if not isinstance(state.get(name), int)]:
            raise CurriculumError(
                f"expected a state of SequenceCurriculum.state_dict(), got one without {', '.join(missing)}; "
                "pass the state that was saved for the curriculum"
            )
        self.step, self.tokens, self.batches, epoch_batches, self.length = (state[name] for name in COUNTS)
        self._epoch.resume(self.loader, epoch_batches, state.get("loader"))

    def __iter__(self) -> Iterator[Any]:
        if self.loader is None:
            raise CurriculumError(
                "expected a loader to iterate over, got none; pass SequenceCurriculum(loader, ...)"
            )
        yield from self._epoch.map(self.loader, self.cut)
        self.end_step()

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        found, unit = self.lengths, "tokens" if self.schedule.by_tokens else "steps"
        shown = ", ".join(map(str, found if len(found) < 7 else (*found[:3], "...", found[-1])))
        kind = self.schedule.schedule if isinstance(self.schedule.schedule, str) else "discrete"
        how = "reshaping" if self.cutter.reshape else "truncating"
        first = f", first step of {self.schedule.max_length}" if self.schedule.longest_first else ""
        return (
            f"SequenceCurriculum({kind} over {self.schedule.total} {unit}, {how}{first}, "
            f"{len(found)} length{'s' * (len(found) > 1)}: {shown})"
        )

    @property
    def ranks(self) -> int:
        """The data-parallel processes that tokens are counted over."""
        if self._ranks is not None:
            return self._ranks
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def _position(self) -> int:
        return self.tokens if self.schedule.by_tokens else self.step

    def _check_padding(self, batch: Any) -> None:
        """Raise if a row starts with padding; masks on a GPU, which the CPU would wait for, are read once."""
        for path, mask in tensors(batch):
            if not path.endswith("attention_mask") or mask.dim() != 2 or (mask.is_cuda and self._position):
                continue
            if not mask[:, 0].all() and bool(((mask[:, 0] == 0) & (mask != 0).any(1)).any()):
                raise CurriculumError(
                    f"expected padding at the end of rows to truncate, got {path} {[*mask.shape]} with "
                    "padding at the start; set padding_side='right' of the tokenizer"
                )


class _Collate:
    """The collate_fn of a curriculum; a class, for it is pickled where workers are spawned."""

    def __init__(self, curriculum: SequenceCurriculum, function: Callable[[Any], Any]) -> None:
        self.curriculum, self.function = curriculum, function

    def __call__(self, samples: Any) -> Any:
        if get_worker_info() is not None:
            raise CurriculumError(
                "expected collate() to run in the process that trains, got a worker, which fetches batches "
                "before their step is known; pass num_workers=0, or wrap the loader: "
                "SequenceCurriculum(DataLoader(...), ...)"
            )
        return self.curriculum.cut(self.function(samples))
