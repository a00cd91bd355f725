"""Run benchmarks/node.py with contenders of which one rank fails while the other waits for it."""

import os
import signal

import node
import torch
import torch.distributed as dist
from node_contenders import CONTENDERS, Contender, Job, Prepared, eager


def raised(job: Job) -> Prepared:
    if dist.get_rank() == 1:
        raise RuntimeError("raised on one rank")
    dist.all_reduce(torch.ones(1))
    return eager(job)


def killed(job: Job) -> Prepared:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    return eager(job)


CONTENDERS.clear()
CONTENDERS.update({each.__name__: Contender(each) for each in (raised, killed, eager)})

if __name__ == "__main__":
    node.main()
