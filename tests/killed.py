"""Run a script, one of whose ranks kills itself: `torchrun tests/killed.py WHERE RANK MARK script.py ...`.

WHERE is "step", before the fifth step of an optimizer, or "save", after the rank has written its part of the
second checkpoint. It happens where the file MARK is not there yet.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter

WHERE, RANK, MARK, *sys.argv = sys.argv[1:]
PLACES: dict[str, tuple[type, str, int, bool]] = {
    "step": (torch.optim.AdamW, "step", 5, False),
    "save": (FileSystemWriter, "write_data", 2, True),
}


def killing(function: Callable[..., Any], call: int, after: bool) -> Callable[..., Any]:
    """The function, which kills the process before or after this call of it."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call or Path(MARK).exists() or os.environ["RANK"] != RANK:
            return function(*args, **kwargs)
        if after:
            function(*args, **kwargs)
        Path(MARK).touch()
        return os.kill(os.getpid(), signal.SIGKILL)

    return wrapped


owner, name, call, after = PLACES[WHERE]
setattr(owner, name, killing(getattr(owner, name), call, after))
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
