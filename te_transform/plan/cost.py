"""Predict from the plan how long a call takes on an H100, for each execution mode.

The captured graphs are counted:

- floating-point operations of matrix products and attention (2 for each multiplication and addition),
- bytes that all other operations read and write,
- number of operations.

Each mode has a GPU time for each of these, and a CPU time for each operation. CPU and GPU work in parallel,
so the call takes the longer of both sums. A backward computes twice as much as its forward. A graph whose
products are too small to gain runs as captured, which is a mode of its own. benchmarks/fit_cost.py fits the
times to measurements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import fx

from te_transform.backends import plain
from te_transform.backends.limits import (
    ALIGNED,
    DTYPES,
    MIN_LOGITS,
    MIN_PADDED_ROWS,
    MIN_PADDED_TOKENS,
    break_even_rows,
    rotation_size,
    small_attention,
)
from te_transform.graph import ops
from te_transform.graph.grouped import grouped
from te_transform.graph.nodes import numel_of, value
from te_transform.plan.assign import product_paths, runs_in_recipe
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.plan.product_sizes import ProductSize, size_of_product
from te_transform.plan.rule import Outcome
from te_transform.plan.work import Work, computed, moved_bytes, sizes_of

BACKWARD = 2.0  # work of a backward, relative to its forward
WAITING = "waiting for the CPU"
_PADS = "pad_vocabulary"  # the rule that pads products


def works_of(
    plans: Sequence[tuple[str, Plan]], mode: RunMode, precision: PrecisionPlan | None, training: bool
) -> list[tuple[RunMode, Work]]:
    """Return the execution mode and the work of each graph of a call.

    Args:
        plans: The plans of the captured graphs in call order, each with the path of the captured module.
        mode: The requested mode. A graph in which no product gains from it runs as captured, or runs the
            original code.
        precision: The products that run in a recipe, or None without a recipe.
        training: True if there is a backward.
    """
    works = []
    for path, plan in plans:
        runs = _run_mode(plan, mode, precision)
        work = sum(map(computed, plan.before.nodes), Work())
        work = sum(chain(_moved(plan, runs), _odd_products(plan.before.nodes, plan, runs)), work)
        if precision is not None and runs not in (ORIGINAL, CAPTURED):
            work = sum(_saved_by_fp8(path, plan, precision, runs.in_cuda_graphs), work)
        work = work.times(1 + BACKWARD) if training else work
        share = 1 / len(plans)  # of the fixed cost of a call
        works.append((runs, replace(work, forwards=share, backwards=share * training)))
    return works


def _run_mode(
    plan: Plan, mode: RunMode, precision: PrecisionPlan | None, added: Sequence[fx.Node] = ()
) -> RunMode:
    """Return the mode in which a graph runs if `mode` is requested.

    At run time, execution/small_batch.py applies the same limits.

    Args:
        added: The operations of a refused match, to predict how the graph would run with the match fused.
    """
    if mode is not FUSED or (precision is not None and precision.small_calls):
        return mode
    products = [site for site in plan.sites if site.is_product]
    sizes, gains = [size_of_product(site, sizes_of) for site in products], _is_gated(added)
    linears = [node for node in added if node.target is ops.linear]
    sizes += [
        ProductSize(math.prod(sizes_of(node)[:-1]), min(sizes_of(node.args[1])), gains) for node in linears
    ]
    is_large = any(size.rows >= size.least_rows(precision is not None, False) for size in sizes)
    if is_large or not (products or added):
        return mode
    return ORIGINAL if precision is None and not added and _runs_the_same_kernels(plan) else CAPTURED


def _odd_products(nodes: Iterable[fx.Node], plan: Plan, mode: RunMode, pads: bool = False) -> Iterator[Work]:
    """Yield the change of work for each product whose weight has an odd number of rows, such as a vocabulary.

    A GPU takes several times as long for such a product, unless it is padded. Inductor pads by itself.

    Args:
        pads: True if these nodes would be padded.
    """
    are_padded = (site for site in plan.sites if isinstance(site.fused, plain.PaddedLinear))
    padded = {site.node.meta.get("origin") for site in are_padded}
    for node in () if pads or mode.bytes == "bytes, compiled" else nodes:
        rows = sizes_of(node.args[1])[0] if node.target is ops.linear else 0
        is_padded = mode is not ORIGINAL and node.meta.get("origin") in padded
        if rows % ALIGNED == 0 or rows < MIN_PADDED_ROWS or is_padded:
            continue
        if numel_of(node) / rows >= MIN_PADDED_TOKENS:
            flops = computed(node).products
            yield Work(products=-flops, odd_products=flops)


def _is_gated(nodes: Sequence[fx.Node]) -> bool:
    """Return True if these operations multiply an activation by a tensor: TE's modules speed this up."""
    acts = {node for node in nodes if node.target in ops.ACTIVATION_OPS}
    return any(node.target is torch.mul and acts & {*node.all_input_nodes} for node in nodes)


def _moved(plan: Plan, mode: RunMode) -> Iterator[Work]:
    """Yield the memory traffic of the operations of a graph.

    The canonical graph combines many captured operations into one. A graph that runs unfused therefore counts
    the captured operations, except where a site stays fused in this mode.
    """
    if mode not in (ORIGINAL, CAPTURED):
        yield from map(moved_bytes, plan.before.nodes)
        return
    taken = [
        outcome for outcome, site in plan.outcomes_with_sites() if mode is CAPTURED and site and _is_one(site)
    ]
    inside = {name for outcome in taken for name in outcome.inside}
    yield from (moved_bytes(node) for node in plan.captured.graph.nodes if node.name not in inside)
    if taken:  # a node without an origin is part of a composite, such as multi-head attention
        yield from (
            moved_bytes(node) for node in plan.before.nodes if node.meta.get("origin") in {None, *inside}
        )


def _is_one(site: Site) -> bool:
    """Return True if a site is counted as one operation in a graph that runs as captured.

    This holds for attention, and for products with their norms and activations. Rotations and losses must be
    large enough for their kernel.
    """
    if isinstance(site.fused, plain.Rotary) and len(sizes := sizes_of(site.node.args[0])) == 4:
        rows, width = rotation_size(sizes)
        return rows >= break_even_rows(width, in_fp8=False)
    return not isinstance(site.fused, plain.CrossEntropy) or _is_in_kernel(site)


def _is_in_kernel(site: Site) -> bool:
    """Return True if a kernel faster than PyTorch's own supports a loss, or attention, of these sizes."""
    sizes = sizes_of(site.node.args[0])
    if isinstance(site.fused, plain.CrossEntropy):
        return numel_of(site.node.args[0]) >= MIN_LOGITS and sizes[-1] % ALIGNED == 0
    if len(sizes) != 4:  # cuDNN's kernels need 4 dimensions
        return False
    return small_attention(sizes, keys=sizes_of(site.node.args[1])[2]) is None


def _runs_the_same_kernels(plan: Plan) -> bool:
    """Return True if a graph that runs as captured executes exactly the operations and kernels of the model.

    Then execution/trials.py also times the model's own code, and the faster of the two runs.
    """
    kernels = (plain.DotProductAttention, plain.CrossEntropy)
    in_kernels = any(isinstance(site.fused, kernels) and _is_in_kernel(site) for site in plan.sites)
    counts = (sum(_moved(plan, mode), Work()).operations for mode in (ORIGINAL, CAPTURED))
    return not in_kernels and len({*counts}) == 1


def _saved_by_fp8(path: str, plan: Plan, precision: PrecisionPlan, in_cuda_graphs: bool) -> Iterator[Work]:
    """Yield the change of work for each product that runs in the recipe instead of in 16 bits."""
    for site, name in product_paths(plan).items():
        if runs_in_recipe(precision, path, name):
            yield from _site_in_fp8(site, precision, in_cuda_graphs)


def _site_in_fp8(site: Site, precision: PrecisionPlan, in_cuda_graphs: bool) -> Iterator[Work]:
    rows = math.prod(sizes_of(site.node.args[0])[:-1])
    for position in site.fused.PRODUCTS:
        outs, ins = sizes_of(site.node.args[position])
        if not precision.small_calls and rows < break_even_rows(min(outs, ins), True, in_cuda_graphs):
            continue
        flops = 2.0 * rows * outs * ins
        numbers = rows * ins + outs * ins
        yield Work(products=-flops, in_fp8=flops, quantized=numbers, in_fp8_calls=1)


@dataclass(frozen=True)
class RunMode:
    """The cost model of one execution mode: the keys of its times in TIMES."""

    bytes: str
    calls: str
    in_cuda_graphs: bool = False

    def cpu_seconds(self, work: Work, times: dict[str, float]) -> float:
        """Return the CPU seconds to launch a call."""
        return (
            work.operations * times[self.calls]
            + work.in_fp8_calls * times[f"{self.calls} in FP8"]
            + work.forwards * times[f"{self.calls} forward"]
            + work.backwards * times[f"{self.calls} backward"]
        )

    def gpu_seconds(self, work: Work, times: dict[str, float]) -> float:
        """Return the GPU seconds of a call."""
        return sum(self.gpu_classes(work, times).values())

    def gpu_classes(self, work: Work, times: dict[str, float]) -> dict[str, float]:
        """Return the GPU seconds of a call by class of operations."""
        products = work.products * times["product"] + work.odd_products * times["product, odd"]
        return {
            "products": products + work.in_fp8 * times["product in FP8"],
            "quantization": work.quantized * times["quantized"],
            "attention": work.attention * times["attention"],
            "norms, activations, copies": work.bytes * times[self.bytes],
            "kernel launches": work.operations * times["launch"],
        }


FUSED = RunMode("bytes, fused", "call, fused")
# Keyed by (compiled, replayed as a CUDA graph).
RUN_MODES = {
    (False, False): FUSED,
    (True, False): RunMode("bytes, compiled", "call, compiled"),
    (False, True): RunMode("bytes, fused", "call, replayed", in_cuda_graphs=True),
    (True, True): RunMode("bytes, compiled", "call, replayed", in_cuda_graphs=True),
}
ORIGINAL, CAPTURED = RunMode("bytes", "call"), RunMode("bytes", "call, captured")

# Seconds per unit, as printed by benchmarks/fit_cost.py. The time of an odd product is measured on a head of
# 50,257 rows, forward and backward (docs/benchmarks.md). A forward alone takes 1.3 times as long. The CPU
# times of an uncompiled fused call and of an FP8 call are guesses: the GPU took longer at all measured
# points.
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
    "times are predicted for an H100 from 610 measurements; in cross-validation the median error was 8% and "
    "the largest 85%; convert(compile='auto') measures the times"
)


def run_mode_of(options: Options) -> RunMode:
    """Return the execution mode that these options request."""
    return ORIGINAL if options.run_original else RUN_MODES[bool(options.compile), options.graphs]


def unknown(plans: Sequence[tuple[str, Plan]], options: Options) -> str | None:
    """Return why no time can be predicted for these options, or None."""
    products = [node for _, plan in plans for node in plan.before.nodes if node.target is ops.linear]
    if not products or {value(node).dtype for node in products} - {*DTYPES}:
        return "predicted only for 16-bit products (te-transform: --dtype bfloat16)"
    if not options.backend.HAS_KERNELS and not options.run_original:
        return "predicted for backend='te' alone"
    recipe = options.recipe.recipe if isinstance(options.recipe, PrecisionPlan) else options.recipe
    return None if recipe in (None, "fp8-delayed") else "predicted for recipe='fp8-delayed' alone"


def predicted_seconds(
    plans: Sequence[tuple[str, Plan]], options: Options, precision: PrecisionPlan | None, training: bool
) -> float:
    """Return the seconds of a call with these options; works_of() documents the arguments."""
    return sum(predicted_classes(plans, options, precision, training).values())


def predicted_classes(
    plans: Sequence[tuple[str, Plan]], options: Options, precision: PrecisionPlan | None, training: bool
) -> dict[str, float]:
    """Return the seconds of a call by class of operations, and the seconds that the GPU waits for the CPU."""
    works = works_of(plans, run_mode_of(options), precision, training)
    seconds_by_class: Counter[str] = Counter()
    for mode, work in works:
        seconds_by_class.update(mode.gpu_classes(work, TIMES))
    waiting = sum(mode.cpu_seconds(work, TIMES) for mode, work in works) - seconds_by_class.total()
    return {kind: seconds for kind, seconds in {**seconds_by_class, WAITING: waiting}.items() if seconds > 0}


def priced(
    path: str, plan: Plan, options: Options, precision: PrecisionPlan | None, training: bool
) -> Iterator[Outcome]:
    """Yield the outcomes of a captured graph, each with its predicted GPU seconds per call.

    `seconds` is the time of the operations as the model has them, `fused_seconds` that of the fused op with
    these options. Both are parts of the time from seconds_of(). They stay None for a refused match that would
    save nothing, and for linears that were merged into another site.

    Args:
        path: The path of the captured module.
    """
    asked, products = run_mode_of(options), product_paths(plan)
    runs = _run_mode(plan, asked, precision)
    canonical = grouped((node.meta.get("origin", ""), node) for node in plan.before.nodes)
    for outcome, site in plan.outcomes_with_sites():
        ours = [node for name in outcome.inside for node in canonical.get(name, ())]
        work = sum(map(computed, ours), Work())
        before = sum((moved_bytes(plan.by_name[name]) for name in outcome.inside), work)
        before = sum(_odd_products(ours, plan, ORIGINAL), before)
        after = sum(map(moved_bytes, ours), work)
        mode = runs if outcome.status == "fused" else _run_mode(plan, asked, precision, added=ours)
        after = sum(_odd_products(ours, plan, mode, pads=outcome.rule == _PADS), after)
        in_fp8 = site in products and runs_in_recipe(precision, path, products[site])
        if in_fp8 and mode is not CAPTURED:
            after = sum(_site_in_fp8(site, precision, mode.in_cuda_graphs), after)
        calls = 1 + BACKWARD * training
        seconds, fused = calls * ORIGINAL.gpu_seconds(before, TIMES), calls * mode.gpu_seconds(after, TIMES)
        known = fused < seconds if outcome.status == "refused" else site is not None
        yield replace(outcome, seconds=seconds, fused_seconds=fused) if known else outcome
