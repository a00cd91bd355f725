"""How long a call takes on an H100 in each way to run a model, predicted from the plan.

What a call computes is counted in the captured graphs: the floating-point operations of matrix products and
of attention (2 for each multiplication and addition), the bytes that all else reads and writes, and how many
operations there are. Each way takes of the GPU a time for each of these, and of the CPU one for each
operation; the longer of the two is the call's, for both work at once. A backward computes twice what its
forward does. A graph whose products gain nothing runs as it was captured, which is a way of its own. The
times are fitted to measured ones by benchmarks/fit_cost.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import fx

from te_transform.backends import plain
from te_transform.backends.limits import (
    ALIGNED,
    DTYPES,
    MIN_ATTENTION_LENGTH,
    MIN_LOGITS,
    MIN_PADDED_ROWS,
    MIN_PADDED_TOKENS,
    break_even_rows,
    is_large,
)
from te_transform.graph import ops
from te_transform.graph.nodes import value
from te_transform.plan.assign import path_below, product_paths
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.plan.rule import Outcome
from te_transform.plan.work import Work, computed, moved, numbers_in, sizes_of

BACKWARD = 2.0  # of what the forward computes
_PADS = "pad_vocabulary"  # the rule whose places are products that would be padded


def works_of(
    plans: Sequence[tuple[str, Plan]], way: Way, precision: PrecisionPlan | None, training: bool
) -> list[tuple[Way, Work]]:
    """What each graph of a call computes, with the way that it runs in.

    Args:
        plans: of the captured graphs in the order of their calls, each with the path of the captured module.
        way: that is asked for; a graph in which no product gains from it runs as it was captured, or is.
        precision: what runs in a recipe, None where nothing does.
        training: whether there is a backward.
    """
    found = []
    for path, plan in plans:
        runs = _runs(plan, way, precision)
        work = sum(map(computed, plan.before.nodes), Work())
        work = sum(chain(_moved(plan, runs), _odd(plan.before.nodes, plan, runs)), work)
        if precision is not None and runs not in (AS_IT_IS, CAPTURED):
            work = sum(_in_fp8(path, plan, precision, runs.in_cuda_graphs), work)
        work = work.times(1 + BACKWARD) if training else work
        share = 1 / len(plans)  # of what a call takes beside its operations
        found.append((runs, replace(work, forwards=share, backwards=share * training)))
    return found


def _runs(plan: Plan, way: Way, precision: PrecisionPlan | None, added: Sequence[fx.Node] = ()) -> Way:
    """Return the way that a graph runs in where `way` is asked for.

    At each call, execution/small_batch.py decides by the same limits.

    Args:
        added: the operations of a place that is refused, to be told how the graph would run with it fused.
    """
    if way is not FUSED or (precision is not None and precision.small_calls):
        return way
    products = [site for site in plan.sites if site.is_product]
    sizes = [_rows_and_width(site) for site in products if site.fused.gains or precision is not None]
    if precision is not None or _is_gated(added):
        linears = [node for node in added if node.target is ops.linear]
        sizes += [(numbers_in(node) / sizes_of(node)[-1], min(sizes_of(node.args[1]))) for node in linears]
    is_large = any(rows >= break_even_rows(width, precision is not None) for rows, width in sizes)
    if is_large or not (products or added):
        return way
    return AS_IT_IS if precision is None and not added and _changes_nothing(plan) else CAPTURED


def _odd(nodes: Iterable[fx.Node], plan: Plan, way: Way, pads: bool = False) -> Iterator[Work]:
    """For each product with an odd number of rows, as a vocabulary has them, what changes: it takes a GPU
    several times as long, unless it is padded; inductor pads by itself.

    Args:
        pads: whether these nodes would be padded.
    """
    are_padded = (site for site in plan.sites if isinstance(site.fused, plain.PaddedLinear))
    padded = {site.node.meta.get("origin") for site in are_padded}
    for node in () if pads or way.bytes == "bytes, compiled" else nodes:
        rows = sizes_of(node.args[1])[0] if node.target is ops.linear else 0
        is_padded = way is not AS_IT_IS and node.meta.get("origin") in padded
        if rows % ALIGNED == 0 or rows < MIN_PADDED_ROWS or is_padded:
            continue
        if numbers_in(node) / rows >= MIN_PADDED_TOKENS:
            flops = computed(node).products
            yield Work(products=-flops, odd_products=flops)


def _rows_and_width(site: Site) -> tuple[float, int]:
    x, weight = site.node.args[0], site.node.args[site.fused.PRODUCTS[0]]
    return numbers_in(x) / sizes_of(x)[-1], min(sizes_of(weight))


def _is_gated(nodes: Sequence[fx.Node]) -> bool:
    """Whether these operations multiply an activation with something: in TE's modules that gains."""
    acts = {node for node in nodes if node.target in ops.ACTIVATIONS}
    return any(node.target is torch.mul and acts & {*node.all_input_nodes} for node in nodes)


def _moved(plan: Plan, way: Way) -> Iterator[Work]:
    """What the operations of a graph read and write: as they were captured, of which rules see many as one,
    but for those that are one in this way."""
    if way not in (AS_IT_IS, CAPTURED):
        yield from map(moved, plan.before.nodes)
        return
    taken = [outcome for outcome, site in plan.places() if way is CAPTURED and site and _is_one(site)]
    inside = {name for outcome in taken for name in outcome.inside}
    yield from (moved(node) for node in plan.captured.graph.nodes if node.name not in inside)
    if taken:  # what has no origin is a part of a composite, such as multi-head attention
        yield from (moved(node) for node in plan.before.nodes if node.meta.get("origin") in {None, *inside})


def _is_one(site: Site) -> bool:
    """Whether what a site stands for is fused in a graph that runs as it was captured: attention, and the
    norms and activations of products; of what gains in a kernel alone, what is large enough for one."""
    if isinstance(site.fused, plain.Rotary) and len(sizes := sizes_of(site.node.args[0])) == 4:
        batch, heads, length, width = sizes
        return batch * length >= break_even_rows(heads * width, in_fp8=False)
    return not isinstance(site.fused, plain.CrossEntropy) or _is_in_kernel(site)


def _is_in_kernel(site: Site) -> bool:
    """Whether a kernel that is faster than PyTorch's own takes a loss, or attention, of these sizes."""
    sizes = sizes_of(site.node.args[0])
    if isinstance(site.fused, plain.CrossEntropy):
        return numbers_in(site.node.args[0]) >= MIN_LOGITS and sizes[-1] % ALIGNED == 0
    if len(sizes) != 4:  # which cuDNN's kernels take
        return False
    keys = sizes_of(site.node.args[1])[2]
    return is_large(sizes, keys) and min(sizes[2], keys) >= MIN_ATTENTION_LENGTH


def _changes_nothing(plan: Plan) -> bool:
    """Whether a graph that runs as it was captured has each operation as the model has it, in no kernel of
    another kind: then execution/trials.py times the model's own code too, and the faster one runs."""
    kernels = (plain.DotProductAttention, plain.CrossEntropy)
    in_kernels = any(isinstance(site.fused, kernels) and _is_in_kernel(site) for site in plan.sites)
    counts = (sum(_moved(plan, way), Work()).operations for way in (AS_IT_IS, CAPTURED))
    return not in_kernels and len({*counts}) == 1


def _in_fp8(path: str, plan: Plan, precision: PrecisionPlan, in_cuda_graphs: bool) -> Iterator[Work]:
    """For each product in the recipe what changes: it is no longer one of 16-bit numbers."""
    for site, name in product_paths(plan).items():
        if _is_in_recipe(path, name, precision):
            yield from _site_in_fp8(site, precision, in_cuda_graphs)


def _is_in_recipe(path: str, name: str, precision: PrecisionPlan) -> bool:
    return precision.sites.get(path_below(path, name)) is None


def _site_in_fp8(site: Site, precision: PrecisionPlan, in_cuda_graphs: bool) -> Iterator[Work]:
    for place in site.fused.PRODUCTS:
        outs, ins = sizes_of(site.node.args[place])
        rows = numbers_in(site.node.args[0]) / sizes_of(site.node.args[0])[-1]
        if not precision.small_calls and rows < break_even_rows(min(outs, ins), True, in_cuda_graphs):
            continue
        flops = 2.0 * rows * outs * ins
        numbers = rows * ins + outs * ins
        yield Work(products=-flops, in_fp8=flops, quantized=numbers, in_fp8_calls=1)


@dataclass(frozen=True)
class Way:
    """A way to run a model by what it takes; the names of its times in TIMES."""

    bytes: str
    calls: str
    in_cuda_graphs: bool = False

    def seconds(self, work: Work, times: dict[str, float]) -> float:
        """Of a call."""
        return max(self.gpu_seconds(work, times), self.cpu_seconds(work, times))

    def cpu_seconds(self, work: Work, times: dict[str, float]) -> float:
        """Of the CPU alone, to launch it."""
        return (
            work.operations * times[self.calls]
            + work.in_fp8_calls * times[f"{self.calls} in FP8"]
            + work.forwards * times[f"{self.calls} forward"]
            + work.backwards * times[f"{self.calls} backward"]
        )

    def gpu_seconds(self, work: Work, times: dict[str, float]) -> float:
        """Of the GPU alone."""
        return (
            work.products * times["product"]
            + work.odd_products * times["product, odd"]
            + work.in_fp8 * times["product in FP8"]
            + work.quantized * times["quantized"]
            + work.attention * times["attention"]
            + work.bytes * times[self.bytes]
            + work.operations * times["launch"]
        )


FUSED = Way("bytes, fused", "call, fused")
# By whether it is compiled, and replayed.
WAYS = {
    (False, False): FUSED,
    (True, False): Way("bytes, compiled", "call, compiled"),
    (False, True): Way("bytes, fused", "call, replayed", in_cuda_graphs=True),
    (True, True): Way("bytes, compiled", "call, replayed", in_cuda_graphs=True),
}
AS_IT_IS, CAPTURED = Way("bytes", "call"), Way("bytes", "call, captured")

# Seconds for one of each, as benchmarks/fit_cost.py prints them. An odd product's is that of a head of 50,257
# rows, forward and backward (docs/benchmarks.md); a forward alone takes 1.3 times that. Those of a fused
# call, uncompiled, and of a call in FP8 are guesses: the GPU took longer at all measured points.
TIMES = {
    "product": 1.43e-15, "product in FP8": 4.76e-16, "quantized": 2.63e-12, "attention": 8.99e-16,
    "product, odd": 7.87e-15,
    "launch": 2.9e-06, "bytes": 6.59e-13, "bytes, fused": 6.37e-13, "bytes, compiled": 5.63e-13,
    "call": 2.79e-05, "call, captured": 2.56e-05, "call, fused": 4e-05, "call, compiled": 3.3e-06,
    "call, replayed": 5.33e-07,
    "call in FP8": 0.0001, "call, captured in FP8": 0.0001, "call, fused in FP8": 0.0001,
    "call, compiled in FP8": 4e-05, "call, replayed in FP8": 2e-05,
    "call forward": 0.000432, "call, captured forward": 0.000323, "call, fused forward": 0.0003,
    "call, compiled forward": 0.00157, "call, replayed forward": 0.00034,
    "call backward": 0.0028, "call, captured backward": 0.00279, "call, fused backward": 0.001,
    "call, compiled backward": 0.00592, "call, replayed backward": 0.00225,
}  # fmt: skip
NOTE = (
    "times are predicted for an H100 by 610 measured ones, off by 8% in half of those and by 85% at the most "
    "when each was predicted by the others: convert(compile='auto') measures them"
)


def way_of(options: Options) -> Way:
    """The way that these options ask for."""
    return AS_IT_IS if options.run_original else WAYS[bool(options.compile), options.graphs]


def unknown(plans: Sequence[tuple[str, Plan]], options: Options) -> str | None:
    """Why nothing is predicted for a model in this way, or None."""
    products = [node for _, plan in plans for node in plan.before.nodes if node.target is ops.linear]
    if not products or {value(node).dtype for node in products} - {*DTYPES}:
        return "predicted for products of 16-bit numbers alone (te-transform: --dtype bfloat16)"
    if not options.backend.HAS_KERNELS and not options.run_original:
        return "predicted for backend='te' alone"
    recipe = options.recipe.recipe if isinstance(options.recipe, PrecisionPlan) else options.recipe
    return None if recipe in (None, "fp8-delayed") else "predicted for recipe='fp8-delayed' alone"


def seconds_of(
    plans: Sequence[tuple[str, Plan]], options: Options, precision: PrecisionPlan | None, training: bool
) -> float:
    """Of a call in the way that the options ask for; see works_of()."""
    works = works_of(plans, way_of(options), precision, training)
    gpu = sum(way.gpu_seconds(work, TIMES) for way, work in works)
    return max(gpu, sum(way.cpu_seconds(work, TIMES) for way, work in works))


def priced(
    path: str, plan: Plan, options: Options, precision: PrecisionPlan | None, training: bool
) -> Iterator[Outcome]:
    """The outcomes of a captured graph, each with what its place takes of the GPU's time in a call.

    That is its part of what seconds_of() predicts: of the operations as the model has them, and of the fused
    op in the way that the options ask for. A refused place that would save nothing by this has no
    numbers. Neither have linears that were merged for another site.

    Args:
        path: of the captured module.
    """
    asked, products = way_of(options), product_paths(plan)
    runs = _runs(plan, asked, precision)
    canonical: dict[str, list[fx.Node]] = {}
    for node in plan.before.nodes:
        canonical.setdefault(node.meta.get("origin", ""), []).append(node)
    for outcome, site in plan.places():
        ours = [node for name in outcome.inside for node in canonical.get(name, ())]
        work = sum(map(computed, ours), Work())
        before = sum((moved(plan.by_name[name]) for name in outcome.inside), work)
        before = sum(_odd(ours, plan, AS_IT_IS), before)
        after = sum(map(moved, ours), work)
        way = runs if outcome.status == "fused" else _runs(plan, asked, precision, added=ours)
        after = sum(_odd(ours, plan, way, pads=outcome.rule == _PADS), after)
        in_fp8 = precision is not None and way is not CAPTURED
        if in_fp8 and site in products and _is_in_recipe(path, products[site], precision):
            after = sum(_site_in_fp8(site, precision, way.in_cuda_graphs), after)
        calls = 1 + BACKWARD * training
        seconds, fused = calls * AS_IT_IS.gpu_seconds(before, TIMES), calls * way.gpu_seconds(after, TIMES)
        known = fused < seconds if outcome.status == "refused" else site is not None
        yield replace(outcome, seconds=seconds, fused_seconds=fused) if known else outcome
