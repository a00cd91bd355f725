# pyright: strict
"""The interface as a type checker sees it, in its strictest mode: `make lint`."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import networkx
import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

import te_transform
from te_transform import integrations, training

model = nn.Linear(2, 2)
batch = {"input": torch.ones(2, 2)}

converted = te_transform.convert(
    model, batch, backend="torch", recipe=None, passes=te_transform.PIPELINE, skip=("head",), compile="auto"
)
assert_type(converted, nn.Linear)
assert_type(te_transform.revert(converted), nn.Linear)
assert_type(te_transform.profile(model, batch, plan=False), te_transform.Profile)
assert_type(te_transform.profile(model).findings[0].gain, float)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
assert_type(
    te_transform.parallelize(converted, mesh["tp"], batch, sequence_parallel=True, skip="head"), nn.Linear
)
assert_type(te_transform.trace(model, batch, train=False), fx.GraphModule)
te_transform.quantize_weights(converted)
with te_transform.accumulate(converted, steps=2):
    pass

te_transform.check_ranks(converted)
te_transform.load_scaling_state(converted, te_transform.scaling_state(converted))

report = te_transform.report(converted)
assert_type(report.counts["linear"], int)
assert_type([site.path for site in report.fused], list[str])
assert_type([reason for site in report.refused for reason in site.reasons], list[str])
report.expect(linear=1)
report.to_html("report.html")
assert_type(report.graph_text("after"), str)
assert_type(report.to_dot(), str)
graph: networkx.DiGraph[str] = report.to_networkx("before")
report = te_transform.inspect(model, batch, backend="te", recipe="fp8-delayed")
assert report.precision is not None
assert_type(report.precision, te_transform.PrecisionPlan)

verification = te_transform.verify(model, converted, batch)
assert_type(verification, te_transform.Verification)
assert_type(verification.title, str)
assert_type(bool(verification), bool)
te_transform.assert_same(model, nn.Linear(2, 2), batch, names={"weight": "weight"})
te_transform.verify(model, nn.Linear(2, 2), batch, names=lambda name: name, weights=lambda state: state)

curriculum = training.SequenceCurriculum([batch], max_length=1024, total_steps=3000, dims={"image": ()})
assert_type(curriculum.lengths, tuple[int, ...])
optimizer = torch.optim.AdamW(model.parameters())
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3000)
schedule = training.TokenSchedule(cosine, 2**19, warmup_steps=100, source=curriculum)
schedule.step()
assert_type(training.variance_norms(optimizer).max, float)

callback = integrations.ConvertCallback(batch, recipe="fp8-delayed")
assert_type(callback, integrations.ConvertCallback)

plan = te_transform.PrecisionPlan.read(Path("precision.toml"))
plan.write("precision.toml")
