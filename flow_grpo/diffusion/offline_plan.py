"""Batch arithmetic of given images: epochs without rollouts, and shares of mixed updates."""

import math
from dataclasses import dataclass, fields, replace

from flow_grpo.diffusion.fields import DiffusionTrainConfig
from flow_grpo.diffusion.plan import BatchPlan
from flow_grpo.diffusion.preference_fields import PreferenceConfig
from flow_grpo.errors import UserError

SHARE_TOLERANCE = 1e-3  # of preferences.share, such as 0.333 for a third


@dataclass(frozen=True)
class OfflinePlan(BatchPlan):
    """Numbers of an epoch that has given images only: `preferences.share=1`.

    A group is a row of the data: a pair, or a single image.
    """

    @property
    def samples(self) -> int:
        return 0

    def overrides_for(self, other: "BatchPlan") -> str:
        """Return the command-line overrides of the settings that have an effect."""
        configs = {f.name: f.metadata.get("config", "") for f in fields(self)}
        unused = [name for name, config in configs.items() if config.startswith("sample.")]
        return super().overrides_for(
            replace(other, **{name: getattr(self, name) for name in unused})
        )

    def smallest(self, num_processes: int) -> "OfflinePlan":
        """Return a plan of one update with the same batches, for a dry run."""
        accumulated = min(2, self.accumulation_steps)  # whole pairs, as the plan has
        return replace(
            self,
            num_processes=num_processes,
            batches_per_epoch=accumulated,
            accumulation_steps=accumulated,
            inner_epochs=1,
            given_rows=self.train_batch_size * accumulated // self.images_per_row,
        )

    def check_whole_groups(self, algorithm: str) -> None:
        """Raise a UserError unless each process trains whole pairs in an update."""
        if self.samples_per_update % self.images_per_row:
            raise UserError(
                f"is odd, but algorithm={algorithm!r} trains pairs of images",
                field="train.batch_size",
                value=self.train_batch_size,
                hint=f"use {self.train_batch_size + 1}",
            )

    def rows(self) -> dict[str, str]:
        """Return the lines of `describe`: text by label."""
        noun = "pairs" if self.images_per_row == 2 else "images"
        per_update = self.given_rows * self.num_processes
        return {
            "given per epoch": f"{per_update * self.updates_per_pass} {noun}"
            f" = {per_update} per update x {self.updates_per_pass} updates",
            "images per update": f"{self.samples_per_update * self.num_processes} = "
            f"{self.train_batch_size} per micro-batch x {self.accumulation_steps} accumulated"
            f" x {self.processes}, each at {self.trained_steps} noise levels",
            **self.context_rows(),
        }


def build_offline_plan(
    train: DiffusionTrainConfig,
    preferences: PreferenceConfig,
    num_processes: int,
    rows: int,
    *,
    images_per_row: int,
    trained_steps: int = 1,
) -> OfflinePlan:
    """Return the plan of epochs of given images.

    Args:
        train: Section `train` of the config.
        preferences: Section `preferences` of the config.
        num_processes: World size.
        rows: Number of pairs or images in the data.
        images_per_row: 2 for pairs.
        trained_steps: Noise levels trained per image.

    Raises:
        UserError: If an epoch is not a whole number of updates.
    """
    per_epoch = preferences.per_epoch
    images = train.batch_size * train.gradient_accumulation_steps * num_processes
    noun = "pairs" if images_per_row == 2 else "images"
    per_update = max(1, images // images_per_row)
    update = (
        f"{images} images per update = train.batch_size={train.batch_size} x "
        f"train.gradient_accumulation_steps={train.gradient_accumulation_steps} x "
        f"{num_processes} processes"
    )
    if not per_epoch and rows < per_update:
        raise UserError(
            f"has {rows} {noun}, which do not fill an update of {per_update} ({update})",
            field="preferences.data",
            value=preferences.data,
            hint="lower train.gradient_accumulation_steps or train.batch_size, or set "
            f"preferences.per_epoch={per_update} to use them several times per epoch",
        )
    if per_epoch % per_update:
        below = per_epoch // per_update * per_update
        nearest = [below, below + per_update] if below else [per_update]
        raise UserError(
            f"must be a multiple of the {per_update} {noun} per update ({update})",
            field="preferences.per_epoch",
            value=per_epoch,
            hint=f"use {' or '.join(map(str, nearest))}",
        )
    updates = (per_epoch or rows) // per_update
    return OfflinePlan(
        num_processes=num_processes,
        sample_batch_size=train.batch_size,
        batches_per_epoch=train.gradient_accumulation_steps * updates,
        group_size=images_per_row,
        train_batch_size=train.batch_size,
        accumulation_steps=train.gradient_accumulation_steps,
        inner_epochs=train.num_inner_epochs,
        trained_steps=trained_steps,
        given_rows=train.batch_size * train.gradient_accumulation_steps // images_per_row,
        images_per_row=images_per_row,
    )


def given_rows_per_update(share: float, trained: int, images_per_row: int) -> int:
    """Return the pairs or images per update and process that are `share` of what is trained.

    Args:
        share: `preferences.share`, below 1.
        trained: Samples that an update trains on one process.
        images_per_row: 2 for pairs.

    Raises:
        UserError: If it is not a whole number.
    """
    exact = share * trained / ((1 - share) * images_per_row)

    def share_of(rows: int) -> float:
        return rows * images_per_row / (rows * images_per_row + trained)

    nearest = max(1, round(exact))
    if abs(share_of(nearest) - share) <= SHARE_TOLERANCE:
        return nearest
    options = sorted({max(1, math.floor(exact)), math.ceil(exact)})
    raise UserError(
        f"is {exact:.3g} {'pairs' if images_per_row == 2 else 'images'} per update and process, "
        f"next to {trained} samples, and must be a whole number",
        field="preferences.share",
        value=share,
        hint=f"use {' or '.join(f'{share_of(rows):.4g}' for rows in options)}",
    )
