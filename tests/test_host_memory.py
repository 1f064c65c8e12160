"""Available memory is that of the container if it has a limit."""

from pathlib import Path

import psutil
import pytest

from flow_grpo import host_memory
from flow_grpo.host_memory import available_memory, memory_limit
from flow_grpo.training.state_copies import MAX_MEMORY_SHARE, fits_in_memory

UNLIMITED = {"": "max", "memory": str(2**63 - 4096)}
NAMES = {  # of limit and usage, and the prefix of statistics
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


@pytest.fixture(params=NAMES, ids=["version 2", "version 1"])
def set_limit(request, tmp_path, monkeypatch):
    """Write the files of a container of which 700 bytes are used, 500 of them for cached files."""
    limit_name, usage_name, prefix = NAMES[request.param]

    def set_limit(limit: int | None) -> None:
        folder = tmp_path / request.param
        folder.mkdir(exist_ok=True)
        text = UNLIMITED[request.param] if limit is None else str(limit)
        (folder / limit_name).write_text(f"{text}\n")
        (folder / usage_name).write_text("700\n")
        other = "" if not prefix else "active_file 7\ninactive_file 7\n"  # without subgroups
        statistics = f"anon 200\n{prefix}active_file 300\n{prefix}inactive_file 200\n{other}"
        (folder / "memory.stat").write_text(statistics)

    monkeypatch.setattr(host_memory, "CGROUPS", Path(tmp_path))
    return set_limit


def test_the_memory_is_that_of_the_container(set_limit):
    machine = memory_limit()  # without files
    assert machine == pytest.approx(psutil.virtual_memory().total, rel=0.01)
    assert 0 < available_memory() < machine
    set_limit(1000)
    assert (memory_limit(), available_memory()) == (1000, 1000 - 200)
    assert fits_in_memory(int(800 * MAX_MEMORY_SHARE))
    assert not fits_in_memory(int(800 * MAX_MEMORY_SHARE) + 1)
    set_limit(100)  # was lowered
    assert available_memory() == 0


def test_a_container_without_a_limit_has_the_memory_of_the_machine(set_limit):
    before = memory_limit()
    set_limit(None)
    assert memory_limit() == before
    assert available_memory() > 2**20
