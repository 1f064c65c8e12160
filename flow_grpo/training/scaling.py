"""Estimate the time of an epoch on many GPUs from measurements on one; no torch.

Measured: seconds to generate a sample and to train on it on one GPU (docs/benchmarks). Everything
else is computed:

- Communication: the ring model of NCCL. A collective of S bytes over N processes takes
  `passes` x (N - 1) steps, each with a latency (alpha) and S / N bytes at the bandwidth of the
  slowest link (beta):

      t = base + intra_steps x alpha_nvlink + inter_steps x alpha_network
          + passes x (N - 1) / N x S / beta

  with 2 passes for an all-reduce, and 1 for an all-gather or a reduce-scatter. It is not overlapped
  with computation here, although DDP and FSDP2 do overlap it, so this is an upper bound. NCCL uses
  trees where latency dominates, which lowers it further.
- Stragglers: all processes wait for the slowest GPU before each update. Speeds are taken as normal
  with the standard deviation `GPU_SPREAD`, so the slowest of N takes 1 + spread x E[max of N].
- Checkpoints: the loop waits for a copy to host memory; files are written in the background, and
  the next save waits until they are complete (checkpoint_writer.py).

Left out: responses of different lengths, data loading, failures, and smaller efficiency at smaller
batches than the measured ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from flow_grpo.report.console import format_duration
from flow_grpo.training.time_estimate import (
    MeasuredTimes,
    RemainingWork,
    epoch_seconds,
    eval_seconds,
    pluralize,
)

# Latencies in seconds, ring algorithm, protocol Simple: NVIDIA/nccl 01afd20, src/graph/tuning.cc,
# lines 57 (baseLat) and 64 to 71 (hwLat).
BASE_LATENCY = 8.4e-6  # per collective
NVLINK_LATENCY = 3.4e-6  # per step within a node
NETWORK_LATENCY = 9.6e-6  # per step between nodes
# Bytes/s of a GPU in each direction: 18 links of 20.6 GB/s (NVIDIA/nccl 069a3d4, src/graph/topo.h,
# SM90_NVLINK_BW). NVIDIA's nominal value for H100 and H200 is 450 GB/s.
NVLINK_BANDWIDTH = 18 * 20.6e9
# Bytes/s of a node in each direction: eight InfiniBand NDR ports of 400 Gbit/s, as in a DGX H200.
NETWORK_BANDWIDTH = 8 * 400e9 / 8
GPUS_PER_NODE = 8
# Assumed, not measured: host copies at half of the nominal PCIe 5.0 x16 (64 GB/s), a shared file
# system of 1 GB/s (`perf/save_seconds` of a run has the real time).
COPY_BANDWIDTH = 32e9
DISK_BANDWIDTH = 1e9
# Lines of the same commands in docs/benchmarks/sd3_h200.jsonl differ by up to 4 % between GPUs of
# the same kind: two standard deviations to each side.
GPU_SPREAD = 0.01
GRADIENT_BYTES = 4  # float32 gradients of trained parameters
GATHERED_BYTES = 2  # weights are gathered in bf16


@dataclass(frozen=True)
class Cluster:
    """Number and connection of the GPUs."""

    gpus: int
    gpus_per_node: int = GPUS_PER_NODE
    network_bandwidth: float = NETWORK_BANDWIDTH  # bytes/s per node
    disk_bandwidth: float = DISK_BANDWIDTH  # bytes/s of a checkpoint

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)


@dataclass(frozen=True)
class Collective:
    """A collective operation that is repeated in every epoch."""

    name: str
    num_bytes: float  # of the complete tensor
    count: int  # per epoch
    passes: int = 1  # over the ring: 2 for an all-reduce


@dataclass(frozen=True)
class Workload:
    """Work of one process, and the data that all of them exchange.

    Attributes:
        samples: Samples per epoch of all processes.
        seconds_per_sample: Measured time to generate a sample and to train on it on one GPU.
        work: Work of one process.
        times: Measured seconds per unit of that work.
        collectives: Communication of an epoch.
        checkpoint_bytes: Size of a checkpoint.
        save_every: Epochs between checkpoints.
        writes_in_background: Whether the files are written from a copy while training continues.
    """

    samples: int
    seconds_per_sample: float
    work: RemainingWork
    times: MeasuredTimes
    collectives: Sequence[Collective]
    checkpoint_bytes: float
    save_every: int
    writes_in_background: bool


@dataclass(frozen=True)
class EpochEstimate:
    """Seconds of each phase of an epoch; checkpoints and evaluations are averaged over epochs."""

    phases: dict[str, float]
    samples: int
    ideal: float  # measured time of the samples, divided by the number of GPUs

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.total

    @property
    def efficiency(self) -> float:
        """Throughput relative to the measured one of a GPU, times the number of GPUs."""
        return self.ideal / self.total

    def share(self, phase: str) -> float:
        """Return the fraction of the time that a phase takes."""
        return self.phases[phase] / self.total


def collective_seconds(num_bytes: float, cluster: Cluster, passes: int = 1) -> float:
    """Return the seconds of a ring collective.

    Args:
        num_bytes: Size of the complete tensor.
        cluster: Number and connection of the GPUs.
        passes: 2 for an all-reduce, 1 for an all-gather or a reduce-scatter.
    """
    n = cluster.gpus
    if n == 1:
        return 0.0
    inter = passes * (cluster.nodes - 1)
    intra = passes * (n - 1) - inter
    bandwidth = NVLINK_BANDWIDTH
    if cluster.nodes > 1:
        bandwidth = min(bandwidth, cluster.network_bandwidth)
    latency = BASE_LATENCY + intra * NVLINK_LATENCY + inter * NETWORK_LATENCY
    return latency + passes * (n - 1) / n * num_bytes / bandwidth


def expected_slowest(gpus: int, spread: float = GPU_SPREAD) -> float:
    """Return the expected time of the slowest of several GPUs, relative to their mean.

    Blom's approximation of the largest order statistic of n standard normals,
    Phi^-1((n - 3/8) / (n + 1/4)).
    """
    return 1 + spread * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))


def trained_collectives(trained: int, updates: int) -> list[Collective]:
    """Return the communication of DDP: the gradients are averaged once per update."""
    return [Collective("gradient all-reduce", GRADIENT_BYTES * trained, updates, passes=2)]


def sharded_collectives(
    parameters: int, trained: int, *, gathers: int, reductions: int
) -> list[Collective]:
    """Return the communication with sharded weights (FSDP2, ZeRO-3).

    Args:
        parameters: All parameters of the model.
        trained: Its trained parameters.
        gathers: How often all weights are gathered per epoch.
        reductions: How often gradients are reduced per epoch.
    """
    return [
        Collective("weight all-gather", GATHERED_BYTES * parameters, gathers),
        Collective("gradient reduce-scatter", GRADIENT_BYTES * trained, reductions),
    ]


def checkpoint_bytes(trained: int, *, ema: bool) -> int:
    """Return the size of a checkpoint, in float32.

    The state has the weights, two moments of Adam and the EMA; weights and EMA are also exported.
    """
    return 4 * trained * (4 + 2 * ema)


def checkpoint_wait(workload: Workload, cluster: Cluster, epoch: float) -> float:
    """Return the seconds that the loop waits for one checkpoint.

    Args:
        workload: Size and frequency of checkpoints.
        cluster: Speed of the disk.
        epoch: Seconds of an epoch.
    """
    writing = workload.checkpoint_bytes / cluster.disk_bandwidth
    if not workload.writes_in_background:
        return writing
    copying = workload.checkpoint_bytes / COPY_BANDWIDTH
    return copying + max(0.0, writing - workload.save_every * epoch)


def estimate_epoch(workload: Workload, cluster: Cluster) -> EpochEstimate:
    """Return the estimated time of an epoch, by phase."""
    phases = epoch_seconds(workload.times, workload.work)
    computing = phases["sampling"] + phases["training"]
    phases["slowest GPU"] = computing * (expected_slowest(cluster.gpus) - 1)
    phases["communication"] = sum(
        each.count * collective_seconds(each.num_bytes, cluster, each.passes)
        for each in workload.collectives
    )
    wait = checkpoint_wait(workload, cluster, sum(phases.values()))
    phases["checkpoint"] = wait / workload.save_every if workload.save_every else 0.0
    evaluations = workload.work.evaluations * eval_seconds(workload.times, workload.work)
    phases["evaluation"] = evaluations / workload.work.epochs
    ideal = workload.samples * workload.seconds_per_sample / cluster.gpus
    return EpochEstimate(phases, workload.samples, ideal)


def estimate_rows(workload: Workload, cluster: Cluster, updates: int) -> dict[str, str]:
    """Return the lines of a plan about time: text by label."""
    found, work = estimate_epoch(workload, cluster), workload.work
    own = ("sampling", "waiting for rewards", "training", "slowest GPU", "communication")
    parts = " + ".join(f"{name} {format_duration(found.phases[name])}" for name in own)
    exchanged = "; ".join(
        f"{each.count} x {each.name} of {each.num_bytes / 1e6:,.0f} MB, "
        f"{1e3 * collective_seconds(each.num_bytes, cluster, each.passes):.1f} ms each"
        for each in workload.collectives
    )
    saved = f"{workload.checkpoint_bytes / 1e6:,.0f} MB "
    frequency = {0: "once", 1: "every epoch"}
    saved += frequency.get(workload.save_every, f"every {workload.save_every} epochs")
    saved += ", in the background" if workload.writes_in_background else ""
    evaluated = f"{format_duration(eval_seconds(workload.times, work))} each, "
    evaluated += f"{pluralize(work.evaluations, 'evaluation')} in {pluralize(work.epochs, 'epoch')}"
    per_update = (found.phases["training"] + found.phases["communication"]) / updates
    return {
        "time per epoch": f"{format_duration(sum(found.phases[name] for name in own))} = {parts}",
        "time per update": format_duration(per_update),
        "communication": f"{exchanged or 'unknown number of parameters'}"
        f" ({found.share('communication'):.2%} of the time)",
        "checkpoint": f"{saved} ({found.share('checkpoint'):.1%} of the time)",
        "evaluation": f"{evaluated} ({found.share('evaluation'):.1%} of the time)",
        "throughput": f"{found.samples_per_second:.1f} samples/s, {found.efficiency:.0%} of "
        f"{cluster.gpus} times the measured rate of one GPU",
    }
