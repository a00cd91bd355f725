"""Check every converted site on the inputs that it gets in the model, and take back those that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from te_transform.backends.limits import at_any_size
from te_transform.compare import Row, judge
from te_transform.dispatch import DispatchSlot
from te_transform.emit import Emitted, undo
from te_transform.inputs import Inputs
from te_transform.originals import Original, fusions, original_parameters
from te_transform.preserve import preserved
from te_transform.progress import progress
from te_transform.replay import in_double, only
from te_transform.rotary import carry
from te_transform.rule import Outcome
from te_transform.slots import Fusion, LinearSlot, NormSlot, OwnerSlot
from te_transform.trace import TraceError

IDLE = "the fused module never ran on the example inputs, its input reaches it on another way than recorded"


def check_sites(model: nn.Module, emitted: list[Emitted], samples: list[Inputs]) -> list[Outcome]:
    """Compare each site with the modules it replaced, on the inputs they get when `model` runs on `samples`.

    Forward and gradients, in training and in evaluation mode, dropout off, against fp64 (see compare.py).
    Needs the memory of one site in fp64 and of each site's inputs. A model on the meta device is not checked.

    Args:
        model: the converted model; but for failing sites it is left bitwise as it was, its random state too.
        emitted: its sites. Those that fail are taken back in the model and removed from this list.
        samples: inputs of the whole model.

    Returns:
        For each site taken back an outcome "refused" of each of its rules, which says what was wrong.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return []
    with preserved(model):
        paths = {module: path for path, module in model.named_modules()}
        # a site whose modules all run as they did has nothing to check
        running = [site for site in emitted if any(slot.fusion for _, slot in site.slots)]
        replays = {site: _Replay(site, paths) for site in running}
        captured = _capture(model, list(replays.values()), samples)
        found = {
            site: _wrong(replays[site], captured[replays[site]]) for site in progress(running, "verifying")
        }
        reasons = {site: reason for site, reason in found.items() if reason}
        reasons |= _unused(model, [site for site in running if site not in reasons], samples)
    for site in reversed(list(reasons)):
        undo(model, site)
        emitted.remove(site)
    return [
        Outcome(rule, path, "refused", (f"rolled back: {reason}",))
        for site, reason in reasons.items()
        for rule, path in site.rules
    ]


def place(fusion: Fusion) -> str:
    """The path of the module that hosts the fused one, which is the path that reports show."""
    return fusion.path.rpartition(".")[0]


def guilty(suspects: Sequence[Any], fails: Callable[[Sequence[Any]], bool]) -> list[Any]:
    """Those of `suspects` that fail alone, else the smallest part that fails together, found by halving."""
    if len(suspects) <= 1:
        return list(suspects)
    middle = len(suspects) // 2
    halves = [half for half in (suspects[:middle], suspects[middle:]) if fails(half)]
    return [one for half in halves for one in guilty(half, fails)] or list(suspects)


@dataclass(frozen=True)
class _Captured:
    """Arguments of a site's first module; at `places` the norm's input stands for its output."""

    inputs: Inputs
    places: tuple[int | str, ...]


class _Replay(nn.Module):
    """A site's modules, called as the model calls them: norm, then linears, or norm, then owner."""

    def __init__(self, site: Emitted, paths: dict[nn.Module, str]):
        super().__init__()
        self.fusion = site.fusion
        modules = [module for module, slot in site.slots if slot.fusion is site.fusion]
        owner = next((module for module in modules if isinstance(module, OwnerSlot)), None)
        self.norm = next((module for module in modules if isinstance(module, NormSlot)), None)
        self.readers = nn.ModuleList([owner] if owner else [m for m in modules if isinstance(m, LinearSlot)])
        self.has_owner = owner is not None
        self.paths = [paths[module] for module in self._parts()]
        self.places: tuple[int | str, ...] = ()

    def _parts(self) -> list[nn.Module]:
        return [*([self.norm] if self.norm is not None else []), *self.readers]

    def by_name(self) -> dict[str, Original]:
        """The original parameters by their names in the model."""
        found: dict[str, Original] = {}
        for path, part in zip(self.paths, self._parts(), strict=True):
            found |= original_parameters(part, path)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(enumerate(args)), **kwargs}
        if self.norm is not None:
            given |= dict.fromkeys(self.places, self.norm(given[self.places[0]]))
        if self.has_owner:
            args = tuple(given.pop(place) for place in range(len(args)))
            out = self.readers[0](*args, **given)
            # without probabilities, which are computed for those who ask: as a call of the whole model does
            return out[0] if isinstance(self.readers[0], DispatchSlot) else out
        if not self.readers:
            return given[0]
        paths = self.paths[-len(self.readers) :]
        return {path: linear(given[0]) for path, linear in zip(paths, self.readers, strict=True)}


class _Tap:
    """Hooks on a site's modules that keep what the first call of each was given."""

    def __init__(self, site: _Replay):
        self.site = site
        self.source: tuple[Tensor, Tensor] | None = None  # the norm's input, and as it was then
        self.normalised: Any = None
        self.captured: _Captured | None = None
        self.hooks = []
        if site.norm is not None:
            self.hooks.append(site.norm.register_forward_pre_hook(self._norm_called, with_kwargs=True))
            self.hooks.append(site.norm.register_forward_hook(self._norm_returned))
        if site.has_owner or site.norm is None:
            self.hooks.append(
                site.readers[0].register_forward_pre_hook(self._reader_called, with_kwargs=True)
            )

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _norm_called(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.source is None:
            x = next(iter((*args, *kwargs.values())))
            self.source = x, _kept(x, trained=True)
            if not self.site.has_owner:
                self.captured = _Captured(Inputs((self.source[1],)), (0,))

    def _norm_returned(self, norm: nn.Module, args: tuple, out: Any) -> None:
        self.normalised = out if self.normalised is None else self.normalised

    def _reader_called(self, reader: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = {**dict(enumerate(args)), **kwargs}
        places = tuple(key for key, value in given.items() if self.source and value is self.normalised)
        if self.captured is not None or (self.site.norm is not None and not places):
            return
        if not self.site.has_owner:
            self.captured = _Captured(Inputs((_kept(next(iter(given.values())), trained=True),)), ())
            return
        known: dict[int, Tensor] = {}  # one tensor passed twice stays one tensor
        if self.source:
            known |= {id(self.source[0]): self.source[1], id(self.normalised): self.source[1]}

        def kept(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                known[id(tensor)] = _kept(tensor)
            return known[id(tensor)]

        self.captured = _Captured(Inputs(*tree_map_only(Tensor, kept, (args, kwargs))), places)


def _kept(tensor: Tensor, trained: bool = False) -> Tensor:
    """The tensor as it is now; it requires a gradient where the model would compute one."""
    trained = trained or tensor.requires_grad or not torch.is_grad_enabled()
    clone = tensor.detach().clone().requires_grad_(trained and tensor.is_floating_point())
    return carry(tensor, clone)


def _capture(
    model: nn.Module, replays: list[_Replay], samples: list[Inputs]
) -> dict[_Replay, list[_Captured]]:
    """What each site is called with, in training mode, by the model on its original modules."""
    captured: dict[_Replay, list[_Captured]] = {replay: [] for replay in replays}
    trainable = not any(parameter.is_inference() for parameter in model.parameters())
    forgetful = torch.autograd.graph.saved_tensors_hooks(lambda saved: None, lambda none: none)
    for sample in samples:
        with contextlib.ExitStack() as stack:
            taps = [_Tap(replay) for replay in replays]
            for tap in taps:
                stack.callback(tap.remove)
            # to see what requires a gradient; of the graph nothing else is kept
            try:
                with torch.set_grad_enabled(trainable), forgetful:
                    _run(model, (), sample)
            except Exception as error:  # on its original modules
                raise TraceError.of(model, sample, error) from error
        for tap in taps:
            captured[tap.site] += [tap.captured] if tap.captured else []
    return captured


def _run(model: nn.Module, enabled: Sequence[Fusion], sample: Inputs) -> set[Fusion]:
    """Run the model in training mode with some of its fusions; returns those whose fused module ran."""
    for module in model.modules():
        module.training = True
    args, kwargs = sample.clone()
    with only(enabled, fusions(model)), at_any_size():
        for fusion in enabled:
            fusion.runs = 0
        model(*args, **kwargs)
        return {fusion for fusion in enabled if fusion.runs}


def _wrong(replay: _Replay, captures: list[_Captured]) -> str | None:
    """What is wrong with a site: its worst number, or what running it raised."""
    if not captures:
        return IDLE
    try:
        failed = [row for row in _rows(replay, captures) if not row.ok]
    except Exception as error:  # whatever it is, the model runs without this site
        return f"on its recorded inputs it raised {type(error).__name__}: {error}"
    return str(max(failed, key=lambda row: row.times)) if failed else None


def _rows(replay: _Replay, captures: list[_Captured]) -> list[Row]:
    rows = []
    twin = in_double(replay)
    for captured in captures:
        replay.places = twin.places = captured.places
        for training in (True, False):
            rows += judge(replay, replay, twin, captured.inputs, _Replay.by_name, [replay.fusion], training)
    return rows


def _unused(model: nn.Module, sites: list[Emitted], samples: list[Inputs]) -> dict[Emitted, str]:
    """What is wrong with sites in the whole model: the fused module never runs there, or the model fails."""
    by_fusion = {site.fusion: site for site in sites}
    reasons = {}
    with torch.no_grad():
        for sample in samples:
            if error := _raised(model, list(by_fusion), sample):
                for fusion in guilty(list(by_fusion), lambda some, on=sample: bool(_raised(model, some, on))):
                    reasons[by_fusion.pop(fusion)] = f"with the fused module the model raised {error}"
        ran = set().union(*(_run(model, list(by_fusion), sample) for sample in samples))
    return reasons | {site: IDLE for fusion, site in by_fusion.items() if fusion not in ran}


def _raised(model: nn.Module, enabled: Sequence[Fusion], sample: Inputs) -> str | None:
    try:
        _run(model, enabled, sample)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
