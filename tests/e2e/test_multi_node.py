"""Training on two nodes, which are two connected network namespaces of one machine."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
from runner import Runner

INTERFACE = "cable0"  # network interface, with the same name on both nodes
ADDRESSES = ("192.0.2.1", "192.0.2.2")
TIMEOUT = 15  # seconds, config.distributed_timeout
VLM_SETTINGS = {
    "eval_questions": 2,
    "sample.questions_per_epoch": 2,
    "sample.group_size": 4,
    "sample.max_new_tokens": 8,
    "train.updates_per_epoch": 1,
    "train.num_inner_epochs": 1,
}


@dataclass(frozen=True)
class Node:
    rank: int
    name: str  # of its network namespace

    def start(self, train: Runner, **fields) -> subprocess.Popen:
        launcher = (
            *("ip", "netns", "exec", self.name),
            *("env", f"PYTHON={sys.executable}", f"GLOO_SOCKET_IFNAME={INTERFACE}"),
            *("bash", "scripts/multi_node/main.sh", "--nodes=2", f"--node-rank={self.rank}"),
            *(f"--master-addr={ADDRESSES[0]}", "--procs-per-node=1", "--"),
        )
        return train.start(launcher=launcher, device="cpu", **fields)

    def processes(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def cut_power(self) -> None:
        """Disconnect the node and kill its processes, so that no connection is closed."""
        ip("-n", self.name, "link", "set", INTERFACE, "down")
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def nodes():
    pair = [Node(rank, f"flow-grpo-{os.getpid()}-{rank}") for rank in (0, 1)]
    created = []
    try:
        for node in pair:
            ip("netns", "add", node.name)
            created.append(node)
        one, other = (node.name for node in pair)
        peer = f"peer name {INTERFACE} netns {other}"
        ip(*f"link add {INTERFACE} netns {one} type veth {peer}".split())
        for node, address in zip(pair, ADDRESSES, strict=True):
            ip("-n", node.name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            ip("-n", node.name, "link", "set", INTERFACE, "up")
            ip("-n", node.name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError):
        remove(created)
        pytest.skip("creating the network namespaces of the nodes requires root and iproute2")
    yield pair
    remove(pair)


def remove(nodes: list[Node]) -> None:
    for node in nodes:
        for pid in node.processes():
            os.kill(pid, signal.SIGKILL)
        ip("netns", "del", node.name)


@pytest.mark.slow
def test_the_loss_of_a_node_ends_the_other_and_the_run_can_be_resumed(nodes, tmp_path):
    """Node 0 is lost, which is the rendezvous host and has the main process.

    After the resume, a signal to one node stops both with a checkpoint. The run uses the VLM
    script; the code that handles a lost node is the same for diffusion models.
    """
    lost, remaining = nodes
    train = Runner(tmp_path / "logs", **VLM_SETTINGS)
    endless = dict(num_epochs=10_000, eval_freq=0, distributed_timeout=TIMEOUT, reward_timeout=5.0)
    endless |= {"script": "scripts/train_vlm.py", "config": "config/vlm.py:tiny_vlm"}
    processes = [node.start(train, **endless) for node in nodes]
    node_line = processes[0].stdout.readline()
    assert node_line == f"node rank 0 of 2, 1 processes, node 0: {ADDRESSES[0]}:29500\n"
    for line in processes[0].stdout:
        if line.startswith("epoch 2/"):
            break
    lost.cut_power()
    _, stderr = processes[1].communicate(timeout=120)
    assert processes[1].returncode == 4
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    assert errors[0].startswith("error: lost contact with another process (")
    assert errors[0].endswith("; start all nodes again with --config.resume=auto")
    assert "Traceback" not in stderr
    assert remaining.processes() == []
    processes[0].communicate()

    before = train.metrics()
    assert len(before) >= 3
    ip("-n", lost.name, "link", "set", INTERFACE, "up")
    processes = [node.start(train, resume="auto", **endless) for node in nodes]
    for line in processes[0].stdout:
        if line.startswith(f"epoch {len(before)}/"):
            break
    processes[1].send_signal(signal.SIGTERM)
    (_, first), (output, second) = (process.communicate(timeout=60) for process in processes)
    assert [process.returncode for process in processes] == [75, 75]
    assert first.splitlines()[-1].startswith("stopped in epoch ")
    assert "error" not in second
    assert output.startswith("node rank 1 of 2,")
    assert len(output.splitlines()) == 1  # only the main process logs
    assert [node.processes() for node in nodes] == [[], []]
    after = train.metrics()
    assert len(after) > len(before)
    assert [line["epoch"] for line in after] == list(range(len(after)))
    assert [line["step"] for line in after] == [line["epoch"] for line in after]
    assert after[: len(before) - 1] == before[:-1]  # the last epoch may have been repeated
