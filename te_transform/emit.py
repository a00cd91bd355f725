"""Edit the user's module tree: the only file that does.

Modules keep their place and identity; those that run otherwise gain a subclass of their own class (slots.py).
Parameters that are joined move into a fused module that the first of them hosts, which reads all others where
they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_transform import dispatch
from te_transform.autocast import AutocastSlot, Precision
from te_transform.dispatch import DispatchSlot
from te_transform.loss import CausalLoss, fusable
from te_transform.originals import fusions
from te_transform.plan import Site
from te_transform.rotary import RotarySlot
from te_transform.rule import Operation
from te_transform.slots import (
    Borrower,
    DeferringNormSlot,
    Fusion,
    HeldSlot,
    LinearSlot,
    Loan,
    NormSlot,
    OwnerSlot,
    Slot,
    SlotModule,
    View,
    slot_class,
)
from te_transform.state import hide
from te_transform.weights import Layout, exact, is_quantised


@dataclass(eq=False)
class Emitted:
    """A site in the tree, with what undoing it takes: the Parameter objects that are joined, their storage
    now inside the fused ones."""

    fusion: Fusion
    slots: list[tuple[nn.Module, Slot]] = field(default_factory=list)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    rules: tuple[tuple[str, str], ...] = ()  # each with the path it is reported at


def emit(model: nn.Module, site: Site, emitted: list[Emitted]) -> None:
    """Put `site` into `model`. Needs the memory of the site's joined parameters once; their originals' is
    freed.

    What undo() takes is added to `emitted` before anything is touched: wherever this is interrupted, undo()
    works.
    """
    holders = dict(_holders(site))
    moved = {t: layout for t, layout in site.layouts.items() if not _stays(layout, site)}
    at_home = {t: layout for t, layout in site.layouts.items() if t not in moved}
    originals = {
        piece.name: holders[piece.name][0]._parameters[holders[piece.name][1]]
        for layout in moved.values()
        for piece in layout.pieces
    }
    joined = {target: _joined(layout, originals) for target, layout in moved.items()}
    fusion = Fusion(
        rule=site.rules[-1][0],
        path=site.name,
        fused=site.fused,
        layouts=site.layouts,
        norm=site.norm.module if site.norm and not site.plain else None,
        columns=tuple(span for _, span in site.linears if span is not None),
        originals={name: weakref.ref(p) for name, p in originals.items()},
    )
    host = model.get_submodule(site.host)
    slots = list(_slots(site, fusion, {name: holders[name] for name in originals}))
    _borrow(site.fused, at_home, holders)
    site.fused._parameters.update(joined)
    site.fused.train(host.training)
    site.fused.__dict__["_te_transform_fusion"] = fusion
    hide(site.fused)
    emitted.append(
        Emitted(fusion, [(module, slot) for module, _, slot in slots], originals, tuple(site.rules))
    )
    for target, parameter in joined.items():
        _alias(moved[target], parameter, originals)
    for module, kind, slot in slots:
        _specialise(module, kind, slot)
    host._modules["fused"] = site.fused
    if site.rotary is not None and not isinstance(site.rotary, RotarySlot):
        site.rotary.__class__ = slot_class(type(site.rotary), RotarySlot, ())


def hold(fusion: Fusion, target: str, parameter: nn.Parameter) -> None:
    """Let the fused module, and the module that it may have it from, hold `parameter` as its `target`."""
    loan = fusion.fused._te_transform_borrowed.get(target)
    if loan is None:
        fusion.fused._parameters[target] = parameter
        return
    loan.module._parameters[loan.attribute] = parameter
    if _save_dequantised not in loan.module._state_dict_hooks.values():
        loan.module.register_state_dict_post_hook(_save_dequantised)


def _save_dequantised(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module._parameters:
        if prefix + name in state:
            state[prefix + name] = exact(state[prefix + name])


def undo(model: nn.Module, emitted: Emitted) -> None:
    """Take a site out again, whole or half made: the very Parameters that were there, with today's values in
    storage of their own."""
    for name, parameter in emitted.parameters.items():
        layout, fused = _where(emitted.fusion, name)
        parameter.data = layout.part(fused.detach(), name).clone(memory_format=torch.contiguous_format)
    _take_out(model, emitted.fusion, emitted.slots, emitted.parameters)


def revert(model: nn.Module) -> nn.Module:
    """The original modules of a converted model, in place, with today's weights, bitwise.

    Parameters that were joined are new objects, all others are the same.

    Raises:
        ValueError: `model` is not a converted one.
    """
    found = fusions(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no converted module, te_transform.convert() it first")
    leave(model)
    for fusion in found:
        _dequantise(fusion)
    slots = [(m, m._te_transform_slot) for m in model.modules() if isinstance(m, SlotModule)]
    for fusion in found:
        parameters = {
            piece.name: _own(layout, getattr(fusion.fused, target), piece.name)
            for target, layout in fusion.layouts.items()
            for piece in layout.pieces
            if target in fusion.fused._parameters
        }
        _take_out(model, fusion, [(m, s) for m, s in slots if _belongs(s, fusion)], parameters)
    model.__dict__.pop("_te_transform", None)
    return model


def _dequantise(fusion: Fusion) -> None:
    """Hold in their own dtype what te_transform.quantize_weights() left in FP8 alone."""
    for target in fusion.layouts:
        held = getattr(fusion.fused, target)
        if is_quantised(held):
            hold(fusion, target, nn.Parameter(exact(held), requires_grad=False))
    for loan in fusion.fused._te_transform_borrowed.values():
        hooks = loan.module._state_dict_hooks
        for key in [key for key, hook in hooks.items() if hook is _save_dequantised]:
            del hooks[key]


def enter_precision(model: nn.Module, precision: Precision, small_calls: bool = False) -> None:
    """Let `model` run in its precision, calls too small to gain from it only if asked to."""
    for fusion in fusions(model):
        if hasattr(fusion.fused, "kept_out"):
            fusion.fused.kept_out = True
    for module in precision.modules:
        module.kept, module.kept_out, module.any_size = precision.kept, False, small_calls
    model.__dict__["_te_transform_precision"] = precision
    model.__class__ = slot_class(type(model), AutocastSlot, ())


def enter_loss(model: nn.Module) -> None:
    """Let the model compute its loss in one kernel, if it has the door for that."""
    if fusable(model):
        model.__dict__["_loss_function"] = CausalLoss(model.loss_function)


def leave(model: nn.Module) -> None:
    """Undo what belongs to no site alone: precision, loss, and the notes on cosines and sines."""
    if isinstance(vars(model).get("_loss_function"), CausalLoss):
        del model.__dict__["_loss_function"]
    for module in model.modules():
        if isinstance(module, RotarySlot):
            module.__class__ = type(module)._te_transform_made_of[0]
    if isinstance(model, AutocastSlot):
        model.__class__ = type(model)._te_transform_made_of[0]
    model.__dict__.pop("_te_transform_precision", None)


def _own(layout: Layout, fused: nn.Parameter, name: str) -> nn.Parameter:
    part = layout.part(fused.detach(), name).clone(memory_format=torch.contiguous_format)
    own = nn.Parameter(part, requires_grad=fused.requires_grad)
    if fused.grad is not None:
        own.grad = layout.part(fused.grad, name).clone(memory_format=torch.contiguous_format)
    return own


def _belongs(slot: Slot, fusion: Fusion) -> bool:
    return slot.fusion is fusion or any(view.fusion is fusion for view in slot.views.values())


def _where(fusion: Fusion, name: str) -> tuple[Layout, Tensor]:
    target = next(
        t for t, layout in fusion.layouts.items() if any(piece.name == name for piece in layout.pieces)
    )
    return fusion.layouts[target], getattr(fusion.fused, target)


def _take_out(
    model: nn.Module, fusion: Fusion, slots: list[tuple[nn.Module, Slot]], parameters: dict[str, nn.Parameter]
) -> None:
    for module, slot in slots:
        own = dict(module._parameters)
        back = {attribute: parameters[view.name] for attribute, view in slot.views.items()}
        if isinstance(module, SlotModule):
            module.__class__ = type(module)._te_transform_made_of[0]
        module.__dict__.pop("_te_transform_slot", None)
        if slot.config is not None:
            module.__dict__["config"] = slot.config
        module._parameters.clear()
        names = dict.fromkeys((*slot.order, *own))
        module._parameters.update({name: back.get(name, own.get(name)) for name in names})
    path, _, child = fusion.path.rpartition(".")
    model.get_submodule(path)._modules.pop(child, None)


def _holders(site: Site) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """For each original parameter the module it belongs to, and its name there."""
    for operation in _operations(site):
        for stored in operation.stored.values():
            module = operation.module
            attribute = next(name for name, p in module._parameters.items() if p is stored.tensor)
            yield stored.name, (module, attribute)


def _operations(site: Site) -> list[Operation]:
    return [operation for operation, _ in site.linears] + ([site.norm] if site.norm else [])


def _joined(layout: Layout, originals: dict[str, nn.Parameter]) -> nn.Parameter:
    used = [originals[piece.name] for piece in layout.pieces]
    values = {name: parameter.detach() for name, parameter in originals.items()}
    joined = nn.Parameter(layout.join(values).contiguous(), requires_grad=used[0].requires_grad)
    if all(p.grad is not None for p in used):
        joined.grad = layout.join(
            {piece.name: p.grad for piece, p in zip(layout.pieces, used, strict=True)}
        ).contiguous()
    return joined


def _alias(layout: Layout, joined: nn.Parameter, originals: dict[str, nn.Parameter]) -> None:
    """Let the original Parameters, which an optimizer may hold, share the joined storage: nothing is kept
    twice."""
    for piece in layout.pieces:
        originals[piece.name].data = layout.part(joined.detach(), piece.name)


def _stays(layout: Layout, site: Site) -> bool:
    """Whether the parameter stays where it is, and the fused module reads it there."""
    return layout.is_same or (site.plain and layout.is_whole)


def _borrow(fused: nn.Module, at_home: dict[str, Layout], holders: dict) -> None:
    """Let the fused module read these parameters in the modules they belong to, instead of its own."""
    pieces = {target: layout.pieces[0] for target, layout in at_home.items()}
    loans = {target: Loan(*holders[piece.name], piece.transposed) for target, piece in pieces.items()}
    fused.__dict__["_te_transform_borrowed"] = loans
    fused.__class__ = slot_class(type(fused), Borrower, tuple(at_home))
    for name in at_home:
        del fused._parameters[name]


def _slots(site: Site, fusion: Fusion, joined: dict) -> Iterator[tuple[nn.Module, type[SlotModule], Slot]]:
    """The modules that will run otherwise than they did, or whose parameters are among the `joined`."""
    targets = {piece.name: target for target, layout in site.layouts.items() for piece in layout.pieces}

    def slot_of(module: nn.Module, **more: object) -> Slot:
        held = {attribute: name for name, (holder, attribute) in joined.items() if holder is module}
        views = {attribute: View(fusion, targets[name], name) for attribute, name in held.items()}
        return Slot(views, tuple(module._parameters), **more)

    if site.norm_in_front and not (site.plain and _is_one_kernel(site.norm.module)):
        kind = NormSlot if site.plain else DeferringNormSlot
        yield site.norm.module, kind, slot_of(site.norm.module, fusion=fusion)
    for operation, columns in site.linears:
        module = operation.module
        slot = slot_of(module, columns=columns)
        if not site.owner and (slot.views or columns or not site.plain):
            slot.fusion = fusion
            yield module, LinearSlot, slot
        elif slot.views:
            yield module, HeldSlot, slot
    if site.owner:
        owner = site.owner.module
        kind = OwnerSlot if site.rewritten else DispatchSlot
        slot = slot_of(owner, fusion=fusion, rewritten=site.rewritten, scale=site.scale)
        slot.rotates = site.rotary is not None
        slot.left_to_compilers = bool(site.plain and site.linears and not joined)  # operations fused, no more
        yield owner, kind, slot


def _is_one_kernel(norm: nn.Module) -> bool:
    return type(norm).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward)


def _specialise(module: nn.Module, kind: type[SlotModule], slot: Slot) -> None:
    module.__dict__["_te_transform_slot"] = slot
    module.__class__ = slot_class(type(module), kind, tuple(slot.views))
    for name in slot.views:
        del module._parameters[name]
    if kind is DispatchSlot:
        dispatch.enter(module, slot)
