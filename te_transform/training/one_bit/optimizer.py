"""The base of the 1-bit optimizers: gradients in, one flat fp32 state, weights out."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_transform.training.one_bit import checks, hook, saved
from te_transform.training.one_bit.checks import OneBitError
from te_transform.training.one_bit.compressed import CompressedMean
from te_transform.training.one_bit.layout import FlatLayout

log = logging.getLogger(__name__)
GradientsOf = dict[nn.Parameter, Tensor]


class OneBitOptimizer(torch.optim.Optimizer):
    """The base of optimizers whose ranks exchange signs. Subclasses compute the update of a step.

    Each quantity of the state is one flat fp32 buffer. `state[parameter]` holds views of the buffers. 16-bit
    weights are updated in fp32 and rounded once per step, without an fp32 copy between steps.
    """

    _step_supports_amp_scaling = True  # GradScaler calls step() on every rank, and step() decides for all

    _buffers: tuple[str, ...] = ()  # the names of flat buffers in `state`
    _scalars: tuple[str, ...] = ("step",)  # the names of 0-dimensional tensors in `state`

    def __init__(
        self, params: Any, defaults: dict[str, Any], process_group: dist.ProcessGroup | None
    ) -> None:
        self.process_group = checks.process_group(process_group)
        self._fixed_layout: FlatLayout | None = None  # from the first use on
        self._flat: dict[str, Tensor] = {}
        # DDP and its parameters. DDP refers to this optimizer where the garbage collector sees no cycle
        self._registered: tuple[weakref.ref[nn.Module], set[nn.Parameter]] | None = None
        self._exchange: CompressedMean | None = None
        self._shared_errors: tuple[Tensor, Tensor] | None = None  # of all ranks, from synchronize() to step()
        self.hook_ran = False  # True if our hook has averaged gradients since the last step
        self.scales_differ = False  # True once GradScaler found an infinity on some ranks only
        super().__init__(params, {"steps": 0, "frozen": False, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch.optim.Optimizer does, before the first step.

        Raises:
            OneBitError: a step was taken, register() was called, parameters are sharded, or an option is out
                of range.
        """
        if self._fixed_layout is not None:
            raise OneBitError(
                "expected all parameters before the first step, got a group after it, which the flat buffers "
                "have no room for; make a new optimizer"
            )
        if self._registered is not None:
            raise OneBitError(
                "expected all parameters before register(), got a group after it, whose gradients "
                "DistributedDataParallel may not average; add the group before"
            )
        super().add_param_group(param_group)
        try:
            checks.check_options(self.param_groups[-1])
            checks.check_distinct(self.param_groups[-1]["params"])
            for parameter in self.param_groups[-1]["params"]:
                checks.check_parameter(parameter)
        except OneBitError:
            self.param_groups.pop()
            raise

    def register(self, ddp_model: nn.Module) -> None:
        """Install a hook with which DDP skips the all-reduce of gradients if this optimizer does not need it.

        Args:
            ddp_model: DistributedDataParallel, before its first backward, with this optimizer's parameters.

        Raises:
            OneBitError: `ddp_model` is no DDP, has another process group, or has other parameters.
        """
        trained = {p for p in self._parameters() if p.requires_grad}
        checks.check_ddp(ddp_model, trained, self.process_group)
        ddp_model.register_comm_hook(self, hook.reduce)
        self._registered = weakref.ref(ddp_model), trained

    @property
    def needs_averaged_gradients(self) -> bool:
        """True if the next step needs gradients that are averaged over all ranks, as in the warm-up."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """The number of past steps, without the steps that GradScaler skipped."""
        return self.param_groups[0]["steps"]

    @property
    def frozen(self) -> bool:
        """True if the variance is frozen, and momenta are exchanged instead of gradients."""
        return self.param_groups[0]["frozen"]

    @torch.compiler.disable  # dynamo would lose the attributes that a step sets, and the errors with them
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights. Every rank must call this equally often.

        Args:
            closure: a function that computes the loss again, with gradients. It is called once.

        Returns:
            The result of the closure, or None.

        Raises:
            OneBitError: at the first step, the ranks hold different parameters or weights; later, a parameter
                has a gradient that was frozen at the first step. The registered DDP runs in join().
        """
        if self._registered is not None:
            checks.check_not_joined(self._registered[0]())
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_first = self._fixed_layout is None
        layout = self._layout
        self._check_gradients()
        if layout.parameters:
            if is_first and layout.world_size > 1:
                self._check_ranks()
            if not self._overflowed():
                self._shared_errors = None
                gradients = self._gradients()
                if self.needs_averaged_gradients and not self.hook_ran and layout.world_size > 1:
                    gradients = self._averaged(gradients)
                self._update(gradients)
        self.hook_ran = False
        return loss

    def _update(self, gradients: GradientsOf) -> None:
        raise NotImplementedError

    def _note(self, **progress: Any) -> None:
        """Store the progress of training in every parameter group, for state_dict()."""
        for group in self.param_groups:
            group.update(progress)

    @property
    def _layout(self) -> FlatLayout:
        """The layout of the parameters that train at its first use."""
        if self._fixed_layout is None:
            groups = [[p for p in group["params"] if p.requires_grad] for group in self.param_groups]
            checks.check_devices([p for group in groups for p in group])
            if self._registered is not None:
                checks.check_reduced([p for group in groups for p in group], self._registered[1])
            self._fixed_layout = FlatLayout(groups, dist.get_world_size(self.process_group))
        return self._fixed_layout

    def _groups_with(
        self, is_chosen: Callable[[nn.Parameter], bool]
    ) -> Iterator[tuple[dict[str, Any], list[nn.Parameter]]]:
        """Yield each group that has chosen parameters, with these parameters."""
        for group, own in zip(self.param_groups, self._layout.groups, strict=True):
            if chosen := [p for p in own if is_chosen(p)]:
                yield group, chosen

    def _parts(self, *buffers: Tensor) -> Iterator[tuple[dict[str, Any], tuple[Tensor, ...]]]:
        """Yield each group with its matrices in each buffer, and then with its vectors."""
        for index, group in enumerate(self.param_groups):
            for parts in zip(*(self._layout.parts(buffer, index) for buffer in buffers), strict=True):
                yield group, parts

    def _mean(self, values: Tensor) -> None:
        """Replace a buffer by its compressed mean over ranks; one rank has nothing to exchange."""
        if self._layout.world_size > 1:
            self._exchanged()(values)

    def _exchanged(self) -> CompressedMean:
        if self._exchange is None:
            self._exchange = CompressedMean(self._layout, self.process_group)
        return self._exchange

    def _check_gradients(self) -> None:
        known = set(self._layout.parameters)
        for parameter in (p for p in self._parameters() if p.grad is not None):
            if parameter not in known:
                raise OneBitError(
                    f"expected parameters that train from the first step on, got a gradient of one of shape "
                    f"{tuple(parameter.shape)} that was frozen then; make a new optimizer after unfreezing"
                )
            if parameter.grad.is_sparse:
                raise OneBitError(
                    "expected dense gradients, got a sparse one; make the nn.Embedding with sparse=False"
                )

    def _check_ranks(self) -> None:
        gradients = [p.grad for p in self._layout.parameters if p.grad is not None]
        is_averaged = checks.agree(list(self._layout.parameters), gradients, self.process_group)
        if is_averaged and not self.hook_ran:
            log.warning(
                "gradients are averaged before step() already, so compressing saves no traffic; call "
                "%s.register(ddp_model), and DistributedDataParallel leaves its all-reduce out",
                type(self).__name__,
            )

    def _overflowed(self) -> bool:
        """Return True on all ranks if GradScaler found an infinity on one; only then is a flag exchanged."""
        overflow = getattr(self, "found_inf", None)
        if overflow is None:
            return False
        overflow = torch.stack([overflow.detach(), -overflow.detach()]).float()
        if dist.get_world_size(self.process_group) > 1:
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.process_group)
        largest, smallest = overflow[0].item(), -overflow[1].item()
        self.scales_differ |= bool(largest) != bool(smallest)
        return bool(largest)

    def _gradients(self) -> GradientsOf:
        """Return the fp32 gradients of the parameters with a gradient, without GradScaler's scale."""
        gradients, _ = self._in_fp32({p: p.grad for p in self._layout.parameters if p.grad is not None})
        if (scale := getattr(self, "grad_scale", None)) is not None and gradients:
            torch._foreach_mul_(list(gradients.values()), scale.double().reciprocal().float())
        return gradients

    def _in_fp32(self, given: GradientsOf) -> tuple[GradientsOf, list[nn.Parameter]]:
        """Return tensors of parameters in fp32, and the parameters whose tensors are copies in one buffer."""
        wide = {p: tensor for p, tensor in given.items() if tensor.dtype == torch.float32}
        if cast := [p for p in given if p not in wide]:
            copies = self._layout.scratch()
            wide |= {p: self._layout.view(copies, p) for p in cast}
            torch._foreach_copy_([wide[p] for p in cast], [given[p] for p in cast])
        return wide, cast

    def _averaged(self, gradients: GradientsOf) -> GradientsOf:
        """Return the mean of gradients over ranks, if no registered DDP has computed it."""
        layout, flat = self._layout, self._layout.buffer()
        views = {p: layout.view(flat, p) for p in layout.parameters}
        if gradients:
            torch._foreach_copy_([views[p] for p in gradients], list(gradients.values()))
        present = torch.tensor([p in gradients for p in views], dtype=torch.uint8, device=flat.device)
        dist.all_reduce(flat.mul_(1 / layout.world_size), group=self.process_group)
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self.process_group)
        return {p: view for (p, view), used in zip(views.items(), present.tolist(), strict=True) if used}

    @contextlib.contextmanager
    def _weights(self) -> Iterator[dict[nn.Parameter, Tensor]]:
        """Yield fp32 weights to update in place. Copies of 16-bit weights are rounded at the end."""
        weights, cast = self._in_fp32({p: p for p in self._layout.parameters})
        yield weights
        if cast:
            torch._foreach_copy_(cast, [weights[p] for p in cast])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Share the errors of all ranks: state_dict() is then complete on every rank. Collective.

        The mean over ranks replaces the worker errors. It loses no correction that was not sent yet. Until
        the next step, each rank's state has the server errors of all ranks.
        """
        if self._exchange is not None and self._shared_errors is None:
            self._shared_errors = self._exchange.errors(is_gathered=True)
            self._exchange.set_errors(*self._shared_errors)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state in the form of torch.optim.Optimizer, without communication.

        After synchronize(), the state resumes on any number of ranks. Otherwise it has this rank's own
        errors, and resumes on the same rank of the same number of ranks. Names and shapes do not change at
        the freeze.
        """
        return self._saved(is_gathered=False)

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return one state for any number of ranks. Collective: all ranks call it, and one rank saves.

        Worker errors are averaged over ranks, and server errors are gathered. No correction that was not sent
        yet is lost. Unlike after synchronize(), this run continues with its own errors.
        """
        return self._saved(is_gathered=True)

    def _saved(self, is_gathered: bool) -> dict[str, Any]:
        packed, errors, owner = super().state_dict(), self._shared_errors, saved.OF_ALL_RANKS
        if not self.state:
            return packed
        if errors is None and self._exchange is None:
            errors = (self._layout.buffer(),) * 2
        elif errors is None:
            errors = self._exchange.errors(is_gathered)
            owner = owner if is_gathered else self._owner
        return saved.with_errors(packed, self._parameters(), self._layout, errors, owner)

    @property
    def _owner(self) -> saved.ErrorOwner:
        return dist.get_rank(self.process_group), dist.get_world_size(self.process_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of state_dict() or gathered_state_dict(), on any number of ranks.

        Errors start at zero, with a warning, if state_dict() saved them without synchronize() on another rank
        or with another number of ranks.

        Raises:
            OneBitError: the state belongs to another optimizer, or to other parameters.
        """
        saved.check(state_dict, {*self._buffers, *self._scalars}, type(self).__name__)
        for group in state_dict["param_groups"]:
            checks.check_saved(group)
        states = saved.by_parameter(state_dict, self._parameters())
        is_frozen = any(group["frozen"] for group in state_dict["param_groups"])
        needed = [p for p in self._parameters() if p.requires_grad and is_frozen]
        saved.check_parameters(states, needed, self._shapes)
        super().load_state_dict({**state_dict, "state": {}})
        self._reset()
        if states:
            with torch.no_grad():
                self._load(states)

    def _shapes(self, parameter: nn.Parameter) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the saved state of a parameter, by name."""
        errors = {saved.ERRORS: (2, 1 + parameter.numel())} if parameter.dim() > 1 else {}
        buffers = dict.fromkeys(self._buffers, tuple(parameter.shape))
        return buffers | dict.fromkeys(self._scalars, ()) | errors

    def __getstate__(self) -> dict[str, Any]:
        raise OneBitError(
            f"expected a {type(self).__name__} to stay in its process, got a deepcopy or pickle, which has "
            "no process group; make another optimizer, and load what state_dict() returned"
        )

    def _start(self) -> None:
        """Make the state on first use, with its final names: checkpoints are read by name."""
        layout = self._layout
        for name in (name for name in self._buffers if name not in self._flat):
            self._flat[name] = layout.buffer()
            for parameter in layout.parameters:
                self.state[parameter][name] = layout.view(self._flat[name], parameter)
        for parameter in layout.parameters:
            state = self.state[parameter]
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
            if parameter.dim() > 1:  # only the name: state_dict() computes the value
                state.setdefault(saved.ERRORS, torch.empty(0, dtype=torch.float32, device=parameter.device))

    def _reset(self) -> None:
        self._flat, self._exchange, self._shared_errors = {}, None, None

    def _load(self, states: dict[nn.Parameter, dict[str, Any]]) -> None:
        layout = self._layout
        self._start()
        for parameter in (p for p in layout.parameters if p in states):
            for name in (*self._buffers, *self._scalars):
                self.state[parameter][name].copy_(states[parameter][name])
        errors = saved.errors(states, layout, self._owner)
        if layout.world_size > 1 and errors is not None:
            self._exchanged().set_errors(*errors)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]
