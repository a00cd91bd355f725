"""Rewrite a captured graph so that each operation has one spelling: the ops of graph/ops.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from te_transform.canonicalize.activations import ACTIVATION_SPELLINGS, put_gates_first
from te_transform.canonicalize.angles import take_angles
from te_transform.canonicalize.attention import ATTENTION_SPELLINGS
from te_transform.canonicalize.composites import inline_composites
from te_transform.canonicalize.functions import spell_functions
from te_transform.canonicalize.grouped import GROUPED_QUERIES
from te_transform.canonicalize.inplace import (
    barriers,
    compute_new_results,
    must_stay,
    put_by_index,
    read_results,
    written,
)
from te_transform.canonicalize.linears import BIASES, FLATTENED, LINEARS, TURNED
from te_transform.canonicalize.loss import LOSSES
from te_transform.canonicalize.noise import drop_noise
from te_transform.canonicalize.norms import NORM_SPELLINGS
from te_transform.canonicalize.op import Forms, write
from te_transform.canonicalize.products import spell_products
from te_transform.canonicalize.rotary import ROTARY, WIDE_ROTARY, join_parts
from te_transform.canonicalize.scattered import scatter_columns
from te_transform.canonicalize.score_layout import drop_score_transposes
from te_transform.canonicalize.shared import share_angles, share_detached, share_norms
from te_transform.canonicalize.sizes import read_sizes_early
from te_transform.canonicalize.softmax import SOFTMAXES
from te_transform.canonicalize.spelling import spell, spell_indices, spell_pieces
from te_transform.graph import edit, nodes

__all__ = ["canonicalize", "written"]

_FIRST_SPELLINGS = (
    LINEARS, BIASES, FLATTENED, NORM_SPELLINGS, TURNED, ACTIVATION_SPELLINGS, ROTARY, WIDE_ROTARY,
    ATTENTION_SPELLINGS, GROUPED_QUERIES, LOSSES,
)  # fmt: skip


def canonicalize(graph: fx.Graph, forms: Sequence[Forms] = ()) -> fx.Graph:
    """Return a copy of a captured graph in the ops of graph/ops.py, with its nodes numbered by region.

    Calls without such an op stay torch calls. The copy runs and computes what was captured, up to rounding:
    an op may round at other points than the model. Submodules (get_attr, call_module, higher-order ops)
    stay, except autograd.Functions that are activations.

    The captured graph is edited too, and its results do not change. Composite functions are inlined, calls
    without readers and effects are erased, sizes are read early, writes to cosines and sines become new
    tensors, and `forms` make their own edits. After an in-place write, readers of the tensor read the node of
    the write, so the write lies between the value and its readers.

    Args:
        graph: the captured graph.
        forms: further forms, which the rules in use need.
    """
    inline_composites(graph)
    edit.eliminate_dead_code(graph)  # an unread mean of attention weights would keep them, and their dropout
    put_by_index(graph)
    read_results(graph)
    compute_new_results(graph)
    scatter_columns(graph)
    for each in forms:
        each.prepare(graph)
    read_sizes_early(graph)
    canonical = edit.copy_graph(graph)
    for node, last in written(canonical).items():  # also writes that the copy will replace by a new value
        node.meta["written"] = last
    cuts = barriers(canonical)
    edit.number_regions(canonical, lambda node: node in cuts or nodes.changes_state(node))
    spell(canonical, must_stay(canonical))
    spell_indices(canonical)
    spell_pieces(canonical)
    spell_products(canonical)
    spell_functions(canonical, graph.owning_module, canonicalize)
    drop_noise(canonical)
    share_angles(canonical)
    share_detached(canonical)
    join_parts(canonical)
    write(canonical, SOFTMAXES)
    drop_score_transposes(canonical)
    for spellings in _FIRST_SPELLINGS:
        write(canonical, spellings)
    take_angles(canonical)
    share_angles(canonical)  # of each layer's rotations
    for each in forms:
        each.spell(canonical)
        write(canonical, each.spellings)
    share_norms(canonical)
    put_gates_first(canonical)
    drop_noise(canonical)
    return canonical
