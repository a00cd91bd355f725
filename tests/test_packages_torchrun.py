"""examples/train_fsdp.py under torchrun: whatever is killed, and whenever, goes on where it was."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import close

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("torchrun"),  # `losses` once a process
    pytest.mark.usefixtures("at_any_size"),
]
ROOT = Path(__file__).parent.parent
EXAMPLE, KILLED = ROOT / "examples/train_fsdp.py", ROOT / "tests/killed.py"
STEPS, EVERY = 8, 2
HANGS = 600.0  # seconds after which a run is taken for one that waits for ever


def run(folder: Path, *killed: str, ranks: int = 2, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """The example, with checkpoints in `folder`; `killed` are the arguments of killed.py, if it is to be."""
    script = [str(KILLED), *killed, str(EXAMPLE)] if killed else [str(EXAMPLE)]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "--max-restarts", str(restarts), *script),
        *("--steps", str(STEPS), "--every", str(EVERY), "--layers", "2", "--width", "32"),
        *("--folder", str(folder)),
    ]
    fresh = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as the example says, for restarts
    return subprocess.run(command, env=fresh, capture_output=True, text=True, timeout=HANGS)


def losses_of(ran: subprocess.CompletedProcess[str]) -> dict[int, float]:
    """Return the loss of each step in its last run."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", ran.stdout)}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of a run without interruption."""
    found = losses_of(run(tmp_path_factory.mktemp("whole")))
    assert [*found] == [*range(STEPS)]
    assert found[STEPS - 1] < found[0]
    return found


def test_torchrun_starts_it_again(losses: dict[int, float], tmp_path: Path):
    """On the same number of ranks, with bitwise the same losses."""
    ran = run(tmp_path, "step", "1", str(tmp_path / "mark"), restarts=1)
    assert (tmp_path / "mark").exists()
    assert losses_of(ran) == losses, ran.stderr


@pytest.mark.parametrize(
    ("where", "rank", "again_on", "last"),
    [("step", "1", 4, 4), ("save", "0", 1, 2), ("save", "1", 4, 2)],
)
def test_a_rank_is_killed(
    where: str, rank: str, again_on: int, last: int, losses: dict[int, float], tmp_path: Path
):
    """The job ends with an error that names the rank; no torn checkpoint is loaded, and on another
    number of ranks the losses are the same within the rounding of float32 sums in another order."""
    ran = run(tmp_path, where, rank, str(tmp_path / "mark"))
    assert ran.returncode != 0
    assert re.search(rf"rank\s*: {rank} .*\n.*exitcode\s*: -9", ran.stderr), ran.stderr
    assert "Signal 9 (SIGKILL) received" in ran.stderr
    assert max(path.name for path in tmp_path.glob("step-*")) == f"step-{last:08d}"
    again = losses_of(run(tmp_path, ranks=again_on))
    assert [*again] == [*range(last, STEPS)]
    close(again, {step: losses[step] for step in again}, rtol=1e-4)
    assert not [*tmp_path.glob("unfinished-*")]
