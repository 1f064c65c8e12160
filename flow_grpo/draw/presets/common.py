"""What presets share."""

from ml_collections import ConfigDict

from flow_grpo.draw.fields import get_config as base_config
from flow_grpo.errors import UserError


def per_gpu_batches(
    config: ConfigDict, *, gpus: int, groups: int, group_size: int, max_batch: int, updates: int = 2
) -> None:
    """Set the batch numbers of `config` for an epoch of `groups` x `group_size` samples.

    Per GPU: the largest batch up to `max_batch` that leaves whole batches, and as many of them
    for each of the `updates` of an epoch. The result is the same epoch on any number of GPUs.
    """
    samples = groups * group_size
    if samples % (gpus * updates):
        raise UserError(
            f"{groups} groups x {group_size} images = {samples} samples do not divide over "
            f"{gpus} GPUs x {updates} updates per epoch; use a number of GPUs that does"
        )
    per_update = samples // (gpus * updates)
    batch = max(b for b in range(1, max_batch + 1) if per_update % b == 0)
    config.sample.num_image_per_prompt = group_size
    config.sample.train_batch_size = config.train.batch_size = batch
    config.sample.num_batches_per_epoch = per_update * updates // batch
    config.train.gradient_accumulation_steps = per_update // batch


def without_grpo(config: ConfigDict) -> None:
    """Its fields back at their defaults: they would have no effect."""
    config.grpo.update(base_config().grpo.to_dict())
