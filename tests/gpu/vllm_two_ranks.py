"""One of two ranks that share a vLLM engine.

Rank 0 makes more requests than rank 1, which stops with an error. Each writes the tokens of its
responses to a file in the given folder.
"""

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from test_vllm_engine import FIRST_LORA, Setup

from flow_grpo.errors import UserError

BATCH_SIZE = 8


def main(family: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    setup = Setup(folder / f"{rank}", family, parallel=2)
    for segment in Path("/dev/shm").glob(f"*-tp:*-cpushm_{rank}"):
        segment.unlink()  # vLLM on a CPU leaves it behind and would not start again
    setup.change_lora(FIRST_LORA)
    responses = {}
    try:
        with setup.vllm.generation_mode():
            for first in range(rank * BATCH_SIZE, len(setup.rows), 2 * BATCH_SIZE):
                if responses and rank == 1:
                    raise UserError("an error on one rank")
                index = list(range(first, first + BATCH_SIZE))
                tokens = [sample.tokens.tolist() for sample in setup.sample(index)]
                responses |= dict(zip(index, tokens, strict=True))
    except UserError:
        assert rank == 1
    (folder / f"{rank}.json").write_text(json.dumps(responses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
