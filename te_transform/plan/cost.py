"""How long a call takes on an H100 in each way to run a model, predicted from the plan.

What a call computes is counted in the captured graphs: the floating-point operations of matrix products and
of attention (2 for each multiplication and addition), the bytes that all else reads and writes, and how many
operations there are. Each way takes of the GPU a time for each of these, and of the CPU one for each
operation; the longer of the two is the call's, for both work at once. A backward computes twice what its
forward does. The times are fitted to measured ones by benchmarks/fit_cost.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from te_transform.backends.limits import DTYPES, break_even_rows
from te_transform.graph import ops
from te_transform.graph.nodes import value
from te_transform.plan.assign import path_below, product_paths
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.plan.rule import Outcome
from te_transform.plan.work import Work, computed, moved, numbers_in, sizes_of

BACKWARD = 2.0  # of what the forward computes


def work_of(
    plans: Iterable[tuple[str, Plan]], way: Way, precision: PrecisionPlan | None, training: bool
) -> Work:
    """What a call computes.

    Args:
        plans: of the captured graphs in the order of their calls, each with the path of the captured module.
        way: to run it. As it is, the operations are the model's own, of which rules see many as one; smaller
            products run in FP8 in a CUDA graph.
        precision: what runs in a recipe, None where nothing does.
        training: whether there is a backward.
    """
    found = Work()
    for path, plan in plans:
        found = sum(map(computed, plan.before.nodes), found)
        found = sum(map(moved, plan.captured.graph.nodes if way is AS_IT_IS else plan.before.nodes), found)
        if precision is not None:
            found = sum(_in_fp8(path, plan, precision, way.in_cuda_graphs), found)
    found = found.times(1 + BACKWARD) if training else found
    return replace(found, forwards=1.0, backwards=float(training))


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
            + work.in_fp8 * times["product in FP8"]
            + work.quantized * times["quantized"]
            + work.attention * times["attention"]
            + work.bytes * times[self.bytes]
            + work.operations * times["launch"]
        )


# By whether it is compiled, and replayed.
WAYS = {
    (False, False): Way("bytes, fused", "call, fused"),
    (True, False): Way("bytes, compiled", "call, compiled"),
    (False, True): Way("bytes, fused", "call, replayed", in_cuda_graphs=True),
    (True, True): Way("bytes, compiled", "call, replayed", in_cuda_graphs=True),
}
AS_IT_IS = Way("bytes", "call")

# Seconds for one of each, as benchmarks/fit_cost.py prints them. Those of a call in FP8 are guesses: the GPU
# took longer at all measured points.
TIMES = {
    "product": 1.5e-15, "product in FP8": 7.76e-16, "quantized": 5.21e-13, "attention": 6.25e-16,
    "bytes": 6.34e-13, "bytes, fused": 5.29e-13, "bytes, compiled": 6.09e-13, "launch": 7.79e-07,
    "call": 3.23e-05, "call, fused": 3.59e-05, "call, compiled": 1.73e-06, "call, replayed": 5.96e-07,
    "call in FP8": 0.0001, "call, fused in FP8": 0.0001, "call, compiled in FP8": 4e-05,
    "call, replayed in FP8": 2e-05,
    "call forward": 0.000441, "call, fused forward": 0.00132, "call, compiled forward": 0.00143,
    "call, replayed forward": 0.000341,
    "call backward": 0.00154, "call, fused backward": 0.00427, "call, compiled backward": 0.00622,
    "call, replayed backward": 0.00224,
}  # fmt: skip
NOTE = (
    "times are predicted for an H100 by 58 measured ones, off by 10% in half of those and by 51% at the most "
    "when each was predicted by the others: convert(compile='auto') measures them"
)


def way_of(options: Options) -> Way:
    """The way that these options ask for."""
    return AS_IT_IS if options.as_it_is else WAYS[bool(options.compile), options.graphs]


def unknown(plans: Sequence[tuple[str, Plan]], options: Options) -> str | None:
    """Why nothing is predicted for a model in this way, or None."""
    products = [node for _, plan in plans for node in plan.before.nodes if node.target is ops.linear]
    if not products or {value(node).dtype for node in products} - {*DTYPES}:
        return "predicted for products of 16-bit numbers alone (te-transform: --dtype bfloat16)"
    if not options.backend.HAS_KERNELS and not options.as_it_is:
        return "predicted for backend='te' alone"
    recipe = options.recipe.recipe if isinstance(options.recipe, PrecisionPlan) else options.recipe
    return None if recipe in (None, "fp8-delayed") else "predicted for recipe='fp8-delayed' alone"


def seconds_of(
    plans: Iterable[tuple[str, Plan]], options: Options, precision: PrecisionPlan | None, training: bool
) -> float:
    """Of a call in the way that the options ask for; see work_of()."""
    way = way_of(options)
    return way.seconds(work_of(plans, way, precision, training), TIMES)


def priced(
    path: str, plan: Plan, options: Options, precision: PrecisionPlan | None, training: bool
) -> Iterator[Outcome]:
    """The outcomes of a captured graph, each with what its place takes of the GPU's time in a call.

    That is its part of what seconds_of() predicts: of the operations as the model has them, and of the fused
    op in the way that the options ask for. A refused place that would save nothing by this has no numbers: it
    may cost what is not in there, as products of odd sizes do. Neither have linears that were merged for
    another site.

    Args:
        path: of the captured module.
    """
    way, products = way_of(options), product_paths(plan)
    canonical: dict[str, list[fx.Node]] = {}
    for node in plan.before.nodes:
        canonical.setdefault(node.meta.get("origin", ""), []).append(node)
    for outcome, site in plan.places():
        ours = [node for name in outcome.inside for node in canonical.get(name, ())]
        work = sum(map(computed, ours), Work())
        before = sum((moved(plan.by_name[name]) for name in outcome.inside), work)
        after = sum(map(moved, ours), work)
        if precision is not None and site in products and _is_in_recipe(path, products[site], precision):
            after = sum(_site_in_fp8(site, precision, way.in_cuda_graphs), after)
        calls = 1 + BACKWARD * training
        seconds, fused = calls * AS_IT_IS.gpu_seconds(before, TIMES), calls * way.gpu_seconds(after, TIMES)
        known = fused < seconds if outcome.status == "refused" else site is not None
        yield replace(outcome, seconds=seconds, fused_seconds=fused) if known else outcome
