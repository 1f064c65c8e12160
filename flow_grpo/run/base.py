"""What lives as long as a run, whatever it trains."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from accelerate import Accelerator
from ml_collections import ConfigDict
from torch import nn
from torch.optim import Optimizer

from flow_grpo.rewards import WeightedReward, close_scorers
from flow_grpo.run import trackers, tracking
from flow_grpo.run.checkpoint import Progress
from flow_grpo.run.distributed import on_all_or_none
from flow_grpo.run.lock import RunLock
from flow_grpo.run.snapshot import Ema
from flow_grpo.run.stopping import StopSignals
from flow_grpo.show.console import Pace
from flow_grpo.show.page import write_at_end


class Trainable(Protocol):
    """What is trained, as far as updating and saving it goes."""

    def parameters(self) -> list[nn.Parameter]: ...

    def moved(self) -> None: ...

    def save(self, folder: Path, prefix: str = "") -> None: ...


@dataclass(kw_only=True)
class Run:
    config: ConfigDict
    accelerator: Accelerator
    reward: WeightedReward
    eval_reward: WeightedReward
    policy: Trainable
    optimizer: Optimizer
    ema: Ema | None
    folder: Path
    progress: Progress
    stop: StopSignals
    lock: RunLock | None  # on the main process
    pace: Pace = field(default_factory=Pace)

    def averaged(self) -> AbstractContextManager:
        """The weights to evaluate: their moving average, where there is one."""
        return self.ema.applied() if self.ema is not None else nullcontext()

    def how_to_go_on(self) -> str:
        name = self.folder.name
        return f"go on with the same command and --config.run_name={name} --config.resume=auto"

    def close(self) -> None:
        """Also of a run that was stopped: what the trackers hold is written, and the report."""
        try:
            close_scorers(self.reward, self.eval_reward)
            trackers.close(self.accelerator)
            if self.lock is not None:
                write_at_end(self.folder, self.lock.check)
        finally:
            if self.lock is not None:
                self.lock.release()

    def check_lock(self) -> None:
        """Before anything is written, on all processes: the folder is still this run's."""
        on_all_or_none(self.accelerator, lambda: self.lock and self.lock.check())

    def bar(self, items: Iterable, name: str, total: int | None = None) -> Iterable:
        return tracking.progress_bar(items, name, self.accelerator, total)
