from torch import nn

from flow_grpo.training.snapshot import Snapshot


class Ema(Snapshot):
    """A moving average of the trained weights, updated every `every` optimizer steps.

    As in Flow-GRPO, the decay at optimizer step n is min((1 + n) / (10 + n), decay): the first
    weights are forgotten soon. It follows from the step, so the average is all there is to save.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, every: int) -> None:
        super().__init__(parameters, "ema")
        self.decay, self.every = decay, every

    def update(self, step: int) -> None:
        if step % self.every == 0:
            self.blend(min((1 + step) / (10 + step), self.decay))
