"""Programs exported from a converted model are the original's: of its own code, under its names."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.conversions import logged
from tests.packages import IDS, Make, close, converted, original

pytestmark = pytest.mark.usefixtures("at_any_size")

LONGER = torch.cat([IDS, IDS.flip(0)])[:, :6]


def exported(make: Make) -> torch.export.ExportedProgram:
    sizes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=30)},)
    return torch.export.export(make().eval(), (IDS,), dynamic_shapes=sizes)


def test_an_exported_program() -> None:
    expected, found = exported(original), exported(converted)
    assert found.graph_signature == expected.graph_signature
    assert [node.target for node in found.graph.nodes] == [node.target for node in expected.graph.nodes]
    for ids in (IDS, LONGER):
        close(found.module()(ids), original().eval()(ids))


def test_exporting_is_no_mistake_to_warn_of() -> None:
    with logged("te_transform") as said:
        exported(converted)
    assert said == []


def test_a_traced_program() -> None:
    traced = torch.jit.trace(converted().eval(), (IDS,))
    close(traced(IDS), original().eval()(IDS))


def test_the_model_runs_fused_after_it_was_exported() -> None:
    model = converted().eval()
    torch.export.export(model, (IDS,))
    close(model(IDS), original().eval()(IDS))


@pytest.mark.integration
def test_onnx(tmp_path: Path) -> None:
    runtime, _ = pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")

    def answer(model: nn.Module, file: Path) -> Tensor:
        torch.onnx.export(model.eval().float(), (IDS,), file, dynamo=True, verbose=False)
        session = runtime.InferenceSession(file)
        (name,) = (given.name for given in session.get_inputs())
        return torch.from_numpy(session.run(None, {name: IDS.numpy()})[0])

    found = answer(converted(), tmp_path / "converted.onnx")
    assert torch.equal(found, answer(original(), tmp_path / "original.onnx"))
    close(found, original().eval().float()(IDS).detach(), rtol=1e-4, atol=1e-5)
