"""DeQA-Score (arXiv 2501.11561) and Q-Align (arXiv 2312.17090): image quality, from 0.2 to 1.

The remote code of both needs transformers 4.36: run it on a reward server with a separate
environment.
"""

from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from PIL import Image
from torch import nn
from transformers import AutoModelForCausalLM

from flow_grpo.errors import UserError
from flow_grpo.rewards.frozen_model import SCORE, ModelScorer, Values
from flow_grpo.rewards.loading import explain_load_errors
from flow_grpo.rewards.option_checks import check_choice

TASKS = ("quality", "aesthetics")  # of Q-Align; these words are inserted into its prompt
MAX_GRADE = 5  # of the scale from 1 that the human raters used
DTYPE_ARGUMENT = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


@dataclass(kw_only=True, eq=False)
class DeQA(ModelScorer):
    """DeQA-Score of image quality, from 1 to 5, divided by 5 as in Flow-GRPO.

    `raw` is the undivided score. The prompt is ignored.
    """

    model: str = "zhiyuanyou/DeQA-Score-Mix3"
    dtype: str = "float16"  # the only one that its remote code supports
    trust_remote_code: bool = False
    revision: str = "main"  # a commit, to pin the code that was reviewed
    kind = "DeQA-Score"

    def load(self) -> nn.Module:
        """Load the model, which executes code of its repository, if `trust_remote_code` is set.

        Raises:
            UserError: If `trust_remote_code` is not set, or the model is not DeQA-Score.
        """
        if self.trust_remote_code is not True:
            raise UserError(
                "executes Python code from its repository",
                field="model",
                value=self.model,
                hint="review that code, then set trust_remote_code=True and revision=COMMIT to pin "
                "it",
            )
        with explain_load_errors("model", self.model, self.kind):
            network = AutoModelForCausalLM.from_pretrained(
                self.model,
                revision=self.revision,
                trust_remote_code=True,
                attn_implementation="eager",
                **{DTYPE_ARGUMENT: self.torch_dtype},
            )
        if not hasattr(network, "score"):
            raise UserError(
                f"is a {type(network).__name__} without the method `score` of {self.kind}",
                field="model",
                value=self.model,
                hint=f"use {self.kind} or a copy of it",
            )
        return network

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        raw = self.grade(images).float()
        return {SCORE: raw / MAX_GRADE, "raw": raw}

    def grade(self, images: list[Image.Image]) -> torch.Tensor:
        """Return grades (N,) from 1 to 5."""
        return self.network.score(images)


@dataclass(kw_only=True, eq=False)
class QAlign(DeQA):
    """Q-Align: quality or aesthetics of an image, graded from 1 to 5 and divided by 5.

    `score` is defined in Q-Future/Q-Align 14dfdff: q_align/model/modeling_mplug_owl2.py:268.
    """

    model: str = "q-future/one-align"
    task: str = TASKS[0]
    kind = "Q-Align"

    def load(self) -> nn.Module:
        check_choice("task", self.task, TASKS)
        return super().load()

    def grade(self, images: list[Image.Image]) -> torch.Tensor:
        return self.network.score(images, task_=self.task, input_="image")
