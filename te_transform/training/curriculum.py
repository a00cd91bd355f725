"""A curriculum of sequence lengths: training begins with short sequences, which grow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.utils.data import default_collate, get_worker_info

from te_transform.graph.keywords import suggests
from te_transform.training.counts import is_count
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

    A batch is cut in the training process, when it leaves the loader. Its position among all batches
    determines its length, so workers may load batches ahead. Other attributes are the loader's.
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
        """Set up a curriculum. It does not read from `loader` yet.

        Args:
            loader: a DataLoader or any iterable of batches. With accelerate, pass the loader that prepare()
                returned. None for collate(), cut() and CurriculumCallback.
            max_length: the length of the loader's sequences, in tokens, and the last length.
            total_steps: the number of optimizer steps until max_length is reached; or
            total_tokens: the number of tokens until then, over all ranks, with padding.
            min_length: the length of the first steps, a multiple of `bucket`; `bucket` by default.
            schedule: "linear", "root" (grows with the square root), or a mapping from steps or tokens to the
                length from that position on.
            bucket: lengths are multiples of this number; 64 suits FP8 and CUDA graphs, 8 suits eager bf16.
            reshape: True to turn the tokens after the length into more rows, False to drop them.
            longest_first: True to give the first step max_length, which reserves its memory.
            accumulation: the number of batches per optimizer step. All of them have the same length.
            ranks: the number of data-parallel processes, for total_tokens; None for all of torch.distributed.
            inputs: the key or index of the inputs in a batch; None for "input_ids", or the first tensor of
                [batch, sequence].
            dims: the sequence dimensions of tensors by key or index, if sizes do not determine them. ()
                leaves a tensor alone.

        Raises:
            CurriculumError: the value of an argument is invalid, by itself or with the other arguments.
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
        self.cutter = Cutter(max_length, reshape, inputs, {} if dims is None else dims)
        self.accumulation, self.loader, self._ranks = accumulation, loader, ranks
        self.length = self.schedule.length_at(0)
        self.step = 0  # optimizer steps whose batches have all been handed out
        self.tokens = 0  # positions handed out so far, over all ranks
        self.batches = 0  # batches of the current step handed out so far
        self._epoch = EpochPosition()
        log.info("%r", self)

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths of batches, ascending. Each length is captured, compiled or recorded once."""
        return self.schedule.lengths

    def cut(self, batch: Any) -> Any:
        """Return the next training batch, cut to its length. Its tensors are contiguous, and stay pinned.

        Raises:
            CurriculumError: the batch has no inputs of [batch, sequence], labels of another length, or a
                tensor with an unclear sequence dimension. The position of the curriculum is unchanged.
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
        if self.batches >= self.accumulation:  # a resumed step may have had more batches
            self.end_step()
        return result

    def end_step(self) -> None:
        """End an optimizer step with fewer batches than `accumulation`, such as the last of an epoch."""
        if self.batches:
            self.step, self.batches = self.step + 1, 0

    def collate(self, function: Callable[[Any], Any] = default_collate) -> Callable[[Any], Any]:
        """Return a collate_fn that cuts the batches of `function`, for a training loader without workers.

        Raises:
            CurriculumError: the collate_fn is called in a worker, which does not know the batches' position.
        """
        return partial(_collated, self, function)  # spawned workers pickle it

    def state_dict(self) -> dict[str, Any]:
        """Return the position in training, and the loader's state if it has one."""
        state = {"step": self.step, "tokens": self.tokens, "batches": self.batches, "length": self.length}
        loader = self.loader.state_dict() if keeps_position(self.loader) else None
        return state | {"epoch_batches": self._epoch.batches, "loader": loader}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from state_dict(). A loader without a state skips the epoch's earlier batches.

        Raises:
            CurriculumError: the state does not come from a curriculum.
        """
        known = state if isinstance(state, Mapping) else {}
        if missing := [name for name in COUNTS if not is_count(known.get(name), least=0)]:
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

    def __bool__(self) -> bool:
        return True  # also without a loader, or with one that has no length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or vars(self).get("loader") is None:  # "loader" lacks while it is unpickled
            raise AttributeError(f"a SequenceCurriculum without a loader has no attribute {name!r}")
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        lengths, unit = self.lengths, "tokens" if self.schedule.by_tokens else "steps"
        shown = ", ".join(map(str, lengths if len(lengths) < 7 else (*lengths[:3], "...", lengths[-1])))
        kind = self.schedule.schedule if isinstance(self.schedule.schedule, str) else "discrete"
        how = "reshaping" if self.cutter.reshape else "truncating"
        first = f", first step of {self.schedule.max_length}" if self.schedule.longest_first else ""
        return (
            f"SequenceCurriculum({kind} over {self.schedule.total} {unit}, {how}{first}, "
            f"{len(lengths)} length{'s' * (len(lengths) > 1)}: {shown})"
        )

    @property
    def ranks(self) -> int:
        """The number of data-parallel processes whose tokens count."""
        if self._ranks is not None:
            return self._ranks
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def _position(self) -> int:
        return self.tokens if self.schedule.by_tokens else self.step

    def _check_padding(self, batch: Any) -> None:
        """Raise if a row starts with padding. Reads a mask on a GPU once, because the CPU waits for it."""
        for path, mask in tensors(batch):
            if not path.endswith("attention_mask") or mask.dim() != 2 or (mask.is_cuda and self._position):
                continue
            if not mask[:, :1].all() and bool(((mask[:, :1] == 0) & (mask > 0)).any()):
                raise CurriculumError(
                    f"expected padding at the end of rows to truncate, got {path} {[*mask.shape]} with "
                    "padding at the start; set padding_side='right' of the tokenizer"
                )


def _collated(curriculum: SequenceCurriculum, function: Callable[[Any], Any], samples: Any) -> Any:
    if get_worker_info() is not None:
        raise CurriculumError(
            "expected collate() to run in the process that trains, got a worker, which fetches batches "
            "before their step is known; pass num_workers=0, or wrap the loader: "
            "SequenceCurriculum(DataLoader(...), ...)"
        )
    return curriculum.cut(function(samples))
