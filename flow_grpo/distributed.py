import torch
from accelerate import Accelerator
from torch import Tensor


def gather_rows(
    accelerator: Accelerator, index: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows of all processes, on the CPU, in the order of their index.

    Processes may hold different numbers of rows, also none. The order makes sums over the rows
    the same for any number of processes.
    """

    def gather(tensor: Tensor, fill: int) -> Tensor:
        tensor = tensor.to(accelerator.device)
        padded = accelerator.pad_across_processes(tensor, dim=0, pad_index=fill)
        return accelerator.gather(padded).cpu()

    index = gather(index, -1)
    order = torch.argsort(index, stable=True)
    order = order[index[order] >= 0]
    return index[order], {name: gather(rows, 0)[order] for name, rows in columns.items()}
