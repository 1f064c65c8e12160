"""One of two processes on one GPU: gradients of replayed steps are averaged over both."""

import sys
from pathlib import Path

import torch
from accelerate import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import distributed

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from gpu_runs import Run


def main() -> None:
    run = Run(
        replay=True,
        handlers=[
            InitProcessGroupKwargs(backend="gloo"),  # NCCL needs one GPU per rank
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )
    assert isinstance(run.policy.module, torch.nn.parallel.DistributedDataParallel)
    trajectory = run.sample(first=4 * distributed.get_rank())
    for _ in range(2):  # captured, then replayed
        with run.policy.module.no_sync():
            own = run.train(trajectory, [0, 1])
        distributed.all_reduce(own)
        with run.policy.module.no_sync():
            run.train(trajectory, [0])
        both = run.train(trajectory, [1], add=True)
        assert torch.equal(run.ratio, torch.ones_like(run.ratio))
        assert (both - own / 2).norm() < 1e-5 * both.norm()
        assert both.norm() > 0


if __name__ == "__main__":
    main()
    print("equal", flush=True)
