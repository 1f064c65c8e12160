"""Launch files: accelerate configs, shell scripts, and the exit codes of the launcher."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from runner import ROOT
from torch.distributed import DistBackendError, DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from flow_grpo.config import error_reporting
from flow_grpo.errors import LostPeer, OutOfMemory, StoppedBySignal, UserError

SCRIPTS = ROOT / "scripts"
FOLDERS = ("accelerate_configs", "multi_node", "single_node", "slurm")
FILES = sorted(path for folder in FOLDERS for path in (SCRIPTS / folder).glob("*.*"))
SHELL = [path for path in FILES if path.suffix in (".sh", ".sbatch")]
CONFIGS = [path for path in FILES if path.suffix == ".yaml"]
MAIN = "scripts/multi_node/main.sh"

KINDS = {
    "single_gpu": "NO",
    "multi_gpu": "MULTI_GPU",
    "multi_node": "MULTI_GPU",
    "deepspeed_zero1": "DEEPSPEED",
    "deepspeed_zero2": "DEEPSPEED",
    "deepspeed_zero3": "DEEPSPEED",
    "fsdp2": "FSDP",
    "fsdp2_hybrid": "FSDP",
}


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


@pytest.mark.parametrize("path", CONFIGS, ids=names(CONFIGS))
def test_accelerate_loads_the_config(path):
    config = load_config_from_file(str(path))
    assert config.distributed_type.value == KINDS[path.stem]
    assert config.num_processes >= (1 if path.stem == "single_gpu" else 2)
    assert config.num_machines == (2 if path.stem == "multi_node" else 1)
    assert config.mixed_precision is None  # config.mixed_precision of the run decides
    assert not config.use_cpu  # would turn DeepSpeed and FSDP off
    if path.stem.startswith("deepspeed"):
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])
        assert config.deepspeed_config["deepspeed_multinode_launcher"] == "standard"
        # set by flow_grpo/diffusion/session.py; DeepSpeed fails on "auto"
        for name in ("gradient_accumulation_steps", "gradient_clipping"):
            assert name not in config.deepspeed_config


def test_no_config_is_missing():
    assert {path.stem for path in CONFIGS} == set(KINDS)


def test_fsdp2_wraps_the_blocks_of_sd3(adapter):
    fsdp = load_config_from_file(str(SCRIPTS / "accelerate_configs/fsdp2.yaml")).fsdp_config
    assert fsdp["fsdp_version"] == 2
    assert fsdp["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    blocks = {type(block).__name__ for block in adapter.transformer.transformer_blocks}
    assert blocks == {fsdp["fsdp_transformer_layer_cls_to_wrap"]}


@pytest.mark.parametrize("path", SHELL, ids=names(SHELL))
def test_shell_scripts_parse(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_files_contain_no_address_or_home_directory(path):
    text = path.read_text("utf-8")
    assert not re.search(r"\d+\.\d+\.\d+\.\d+|localhost|/home/|/mnt/|/root", text)


@pytest.fixture
def bash(tmp_path):
    """Run scripts with a fake `python` that prints its arguments, without launcher variables."""
    tools = tmp_path / "bin"
    tools.mkdir()
    fake(tools / "python", 'if [[ "$1" == -c ]]; then echo 3; else echo "RUNS $*"; fi')

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "MASTER_", "NODE_RANK", "NNODES", "PYTHON"))
        }
        return subprocess.run(
            ["bash", *arguments],
            cwd=ROOT,
            env={**clean, "PATH": f"{tools}:{os.environ['PATH']}", **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    run.tools = tools
    return run


def fake(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


NODES, RANK, ADDRESS = ("--nodes", "2"), ("--node-rank", "1"), ("--master-addr", "node-a")
REST = ("--", "--config=config/base.py")


def assert_rejected(done: subprocess.CompletedProcess, *parts: str) -> None:
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for part in parts:
        assert part in done.stderr
    assert "RUNS" not in done.stdout


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ((*RANK, *ADDRESS, *REST), ("--nodes", "NNODES")),
        ((*NODES, *ADDRESS, *REST), ("--node-rank", "NODE_RANK")),
        ((*NODES, *RANK, *REST), ("--master-addr", "MASTER_ADDR")),
        ((*NODES, *RANK, *ADDRESS), ("nothing to train", "after --")),
        (("--nodes", *REST), ("--nodes needs a value",)),
        (("--config=x", *REST), ("'--config'", "after --")),
        ((*NODES, "--node-rank=2", *ADDRESS, *REST), ("--node-rank='2'", "from 0 to 1")),
        (("--nodes=two", *RANK, *ADDRESS, *REST), ("--nodes='two'",)),
        ((*NODES, *RANK, *ADDRESS, "--master-port=0", *REST), ("--master-port='0'",)),
        ((*NODES, *RANK, *ADDRESS, "--procs-per-node=0", *REST), ("--procs-per-node='0'",)),
        (
            (*NODES, *RANK, *ADDRESS, "--accelerate-config=no.yaml", *REST),
            ("--accelerate-config=", "no.yaml"),
        ),
        ((*NODES, *RANK, *ADDRESS, "--", "train_vim.py"), ("script", "train_vim.py")),
    ],
)
def test_main_rejects_missing_and_invalid_options(bash, given, parts):
    assert_rejected(bash(MAIN, *given), *parts)


def test_main_starts_torchrun_with_its_arguments(bash):
    done = bash(MAIN, *NODES, *RANK, *ADDRESS, "--master-port=29511", *REST, "--config.seed=1")
    assert done.returncode == 0, done.stderr
    summary, runs = done.stdout.splitlines()
    assert summary == "node rank 1 of 2, 3 processes, node 0: node-a:29511"
    assert runs == (
        "RUNS scripts/multi_node/launch.py torchrun --rdzv_conf timeout=600 --nnodes 2 "
        "--node_rank 1 --nproc_per_node 3 --master_addr node-a --master_port 29511 "
        "scripts/train.py --config=config/base.py --config.seed=1"
    )


def test_main_starts_accelerate_with_all_processes_of_all_nodes(bash):
    file = "scripts/accelerate_configs/deepspeed_zero2.yaml"
    done = bash(
        MAIN, *NODES, *RANK, *ADDRESS, "--procs-per-node=4", "--accelerate-config", file, *REST
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"launch.py accelerate --rdzv_conf timeout=600 --config_file {ROOT / file}" in done.stdout
    )
    assert "--num_machines 2 --machine_rank 1 --num_processes 8" in done.stdout
    assert "--main_process_ip node-a --main_process_port 29500" in done.stdout


def test_main_starts_the_given_script(bash):
    rest = ("--", "scripts/train_vlm.py", "--config=config/vlm.py:tiny_vlm")
    done = bash(MAIN, *NODES, *RANK, *ADDRESS, *rest)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(
        f" --master_port 29500 {ROOT / rest[1]} --config=config/vlm.py:tiny_vlm\n"
    )


def test_main_reads_variables_which_arguments_override(bash):
    variables = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "node-b", "MASTER_PORT": "29522"}
    done = bash(MAIN, *REST, **variables)
    assert done.stdout.startswith("node rank 3 of 4, 3 processes, node 0: node-b:29522\n")
    done = bash(MAIN, *NODES, *RANK, *ADDRESS, "--master-port", "29533", *REST, **variables)
    assert done.stdout.startswith("node rank 1 of 2, 3 processes, node 0: node-a:29533\n")


def test_main_reads_slurm_variables(bash):
    fake(
        bash.tools / "scontrol", '[[ "$*" == "show hostnames gpu[3-4]" ]] && printf "gpu3\ngpu4\n"'
    )
    slurm = {
        "SLURM_NODEID": "1",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "gpu[3-4]",
        "SLURM_JOB_ID": "1234567",
    }
    done = bash(MAIN, *REST, **slurm)
    assert done.stdout.startswith("node rank 1 of 2, 3 processes, node 0: gpu3:24567\n")
    done = bash(MAIN, *REST, **slurm, MASTER_ADDR="node-b", MASTER_PORT="29522", NODE_RANK="0")
    assert done.stdout.startswith("node rank 0 of 2, 3 processes, node 0: node-b:29522\n")
    fake(bash.tools / "scontrol", "exit 1")
    assert_rejected(bash(MAIN, *REST, **slurm), "scontrol", "--master-addr")


def test_main_has_help(bash):
    done = bash(MAIN, "--help")
    assert done.returncode == 0
    for word in (*NODES[:1], *RANK[:1], *ADDRESS[:1], "--master-port", "--procs-per-node"):
        assert word in done.stdout
    for word in ("--accelerate-config", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "resume=auto"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("train_1gpu.sh tiny_ocr", "scripts/train.py --config config/grpo.py:tiny_ocr"),
        ("train_multi_gpu.sh tiny_ocr 4", "multi_gpu.yaml --num_processes 4"),
        ("train_multi_gpu.sh tiny_ocr", "multi_gpu.yaml --num_processes 3"),
        ("train_deepspeed.sh config/base.py", "deepspeed_zero2.yaml --num_processes 3"),
        ("train_deepspeed.sh config/base.py 3 8", "deepspeed_zero3.yaml --num_processes 8"),
        ("train_fsdp2.sh config/base.py 2", "fsdp2.yaml --num_processes 2"),
        ("train_fsdp2.sh config/vlm.py:tiny_vlm 2", "scripts/train_vlm.py --config config/vlm.py:"),
        ("train_1gpu.sh config/vlm.py:tiny_vlm", "scripts/train_vlm.py --config config/vlm.py:"),
    ],
)
def test_single_node_scripts_start_training(bash, arguments, command):
    done = bash(*f"scripts/single_node/{arguments}".split(), "--config.reward_fn={'ocr': 1.0}")
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
    config = arguments.split()[1]
    assert f"--config {config if '.py' in config else 'config/grpo.py:' + config} " in done.stdout
    assert done.stdout.endswith("--config.reward_fn={'ocr': 1.0}\n")
    for file in re.findall(r"scripts/accelerate_configs/\S+", done.stdout):
        assert (ROOT / file).is_file()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("train_1gpu.sh", "CONFIG is missing"),
        ("train_multi_gpu.sh --config.seed=1", "CONFIG is missing"),
        ("train_multi_gpu.sh tiny_ocr many", "GPUS='many'"),
        ("train_deepspeed.sh tiny_ocr 4", "STAGE='4'"),
        ("train_fsdp2.sh tiny_ocr 0", "GPUS='0'"),
    ],
)
def test_single_node_scripts_reject_invalid_arguments(bash, arguments, problem):
    script = arguments.split()[0]
    usage = f"usage: bash scripts/single_node/{script} CONFIG"
    assert_rejected(bash(*f"scripts/single_node/{arguments}".split()), problem, usage)


def test_a_slurm_job_starts_the_given_script(bash):
    """main.sh starts it on each node."""
    fake(bash.tools / "srun", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')
    fake(bash.tools / "scontrol", 'echo "gpu3"')
    slurm = {"SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "gpu3"}
    done = bash(
        "scripts/slurm/train.sbatch",
        "scripts/train_vlm.py",
        "--config=config/vlm.py:tiny_vlm",
        SLURM_JOB_ID="77",
        SLURM_SUBMIT_DIR=str(ROOT),
        **slurm,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(
        f" {ROOT / 'scripts/train_vlm.py'} --config=config/vlm.py:tiny_vlm "
        "--config.run_name=slurm-77 --config.resume=auto\n"
    )


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (0, False), (2, False), (4, False)])
def test_a_slurm_job_is_requeued_only_if_it_was_stopped_by_a_signal(bash, code, requeued):
    fake(bash.tools / "srun", f'echo "SRUN $*"; exit {code}')
    fake(bash.tools / "scontrol", 'echo "SCONTROL $*"')
    done = bash(
        "scripts/slurm/train.sbatch",
        "--config=config/base.py",
        SLURM_JOB_ID="77",
        SLURM_SUBMIT_DIR=str(ROOT),
    )
    assert done.returncode == code
    assert "scripts/multi_node/main.sh -- --config=config/base.py" in done.stdout
    assert "--config.run_name=slurm-77 --config.resume=auto" in done.stdout
    assert ("SCONTROL requeue 77" in done.stdout) == requeued


@pytest.fixture
def launch(monkeypatch):
    """Load scripts/multi_node/launch.py; `launch.ends_with(error)` runs its main."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    spec = importlib.util.spec_from_file_location("launch", SCRIPTS / "multi_node/launch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.logging, "disable", lambda level: None)

    def ends_with(error: Exception) -> int:
        def fail(*_):
            raise error

        monkeypatch.setattr(module, "launch", fail)
        return module.main("torchrun", [])

    module.ends_with = ends_with
    return module


def children(*codes: int) -> ChildFailedError:
    """Return the failure of processes that exited one second after the other."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        for rank, code in enumerate(codes)
    }
    for rank, failure in failures.items():
        failure.timestamp = rank
    return ChildFailedError("train.py", failures)


@pytest.mark.parametrize(
    ("codes", "code", "shown"),
    [
        ((2, 2), 2, ""),
        ((75, -15), 75, ""),
        ((4, -15), 4, ""),
        ((4, 1), 1, "error: process 1 of this node exited with code 1\n"),
        ((4, -9), 137, "error: process 1 of this node was killed by SIGKILL"),
        ((-6, -15), 134, "error: process 0 of this node was killed by SIGABRT"),
    ],
)
def test_the_launcher_exits_with_the_code_of_the_first_failure(launch, capsys, codes, code, shown):
    assert launch.ends_with(children(*codes)) == code
    stderr = capsys.readouterr().err
    assert stderr.startswith(shown)
    assert len(stderr.splitlines()) == bool(shown)


def test_the_launcher_reports_why_it_could_not_start(launch, capsys):
    assert launch.ends_with(SignalException("asked to stop", 15)) == 75
    assert capsys.readouterr().err == ""
    assert launch.ends_with(DistNetworkError("The client socket has timed out.\nframe #0")) == 4
    assert "(The client socket has timed out)" in capsys.readouterr().err
    assert launch.ends_with(ImportError("DeepSpeed is not installed")) == 2
    assert capsys.readouterr().err == "error: DeepSpeed is not installed\n"


GLOO = (
    "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[192.0.2.1]:27015. This is typically caused by a remote worker crashing. Check the logs."
)


def fails_with(error: Exception, *, debug: bool = False) -> None:
    def fail():
        raise error

    error_reporting.exit_on_user_error(fail, debug=debug)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(GLOO), "Connection closed by peer [192.0.2.1]:27015"),
        (RuntimeError("Application timeout caused pair closure"), "Application timeout"),
        (DistBackendError("NCCL error in: x.hpp:1, remote process exited\nmore"), "NCCL error in"),
    ],
)
def test_a_lost_process_is_one_line_per_node(launch, capsys, monkeypatch, error, reason):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "8")  # also if the lost process is rank 0
    with pytest.raises(SystemExit) as end:
        fails_with(error)
    assert end.value.code == LostPeer.exit_code == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert reason in line
    assert "--config.resume=auto" in line
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        fails_with(error)
    assert capsys.readouterr().err == ""


def test_an_error_of_a_later_rank_is_reported_by_it_after_a_delay(capsys, monkeypatch, tmp_path):
    """No other rank failed with it, so the launcher did not terminate this one."""
    file, waited = tmp_path / "error.json", []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(error_reporting.time, "sleep", waited.append)
    for rank, error in (("0", UserError("no 😀 at x")), ("1", UserError("no 😀 at x"))):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            fails_with(error)
        assert capsys.readouterr().err == "error: no 😀 at x\n"
    assert waited == [error_reporting.SLOWEST_RANK_SECONDS]
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file=str(file))
    report = str(ChildFailedError("train.py", {1: failure}))
    assert report.splitlines()[-2] == "  traceback : error: no 😀 at x"


@pytest.mark.parametrize("error", [StoppedBySignal("stopped in epoch 2"), OutOfMemory("no memory")])
def test_errors_of_one_rank_are_reported_without_delay(capsys, monkeypatch, tmp_path, error):
    waited = []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(error_reporting.time, "sleep", waited.append)
    with pytest.raises(SystemExit) as end:
        fails_with(error)
    assert end.value.code == error.exit_code
    assert waited == []


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="sizes"):
        fails_with(RuntimeError("sizes of tensors must match"))
    with pytest.raises(RuntimeError, match="closed by peer"):
        fails_with(RuntimeError(GLOO), debug=True)
