"""One of two processes that share a vLLM. The first asks more often than the second, which stops at
a mistake. Each writes the tokens of its answers to a file in the folder that is named.
"""

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from test_vllm_engine import FIRST_LORA, Setup

from flow_grpo.errors import UserError

AT_ONCE = 8


def main(family: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    setup = Setup(folder / f"{rank}", family, parallel=2)
    for left in Path("/dev/shm").glob(f"*-tp:*-cpushm_{rank}"):
        left.unlink()  # on a CPU vLLM does not, and would not start again
    setup.change_lora(FIRST_LORA)
    told = {}
    try:
        with setup.vllm.awake():
            for first in range(rank * AT_ONCE, len(setup.rows), 2 * AT_ONCE):
                if told and rank == 1:
                    raise UserError("a mistake of one process")
                index = list(range(first, first + AT_ONCE))
                tokens = [sample.tokens.tolist() for sample in setup.sample(index)]
                told |= dict(zip(index, tokens, strict=True))
    except UserError:
        assert rank == 1
    (folder / f"{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
