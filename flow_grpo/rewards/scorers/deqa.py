"""DeQA-Score (arXiv 2501.11561): how good an image looks, whatever its prompt, in 0.2 to 1.

The model comes with code of its own that wants transformers 4.36: run it on a reward server in
an environment of its own.
"""

from dataclasses import dataclass

import transformers
from packaging.version import Version
from PIL import Image
from torch import nn
from transformers import AutoModelForCausalLM

from flow_grpo.errors import UserError
from flow_grpo.rewards.loading import SCORE, ModelScorer, Values, explained

BEST = 5  # on the scale that its raters used, from 1
DTYPE = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


@dataclass(kw_only=True, eq=False)
class DeQA(ModelScorer):
    """The score over 5, as Flow-GRPO scales it, and the `raw` one from 1 to 5."""

    model: str = "zhiyuanyou/DeQA-Score-Mix3"
    dtype: str = "float16"  # its own code computes in nothing else
    trust_remote_code: bool = False
    revision: str = "main"  # a commit, to keep the code that was read

    def load(self) -> nn.Module:
        if self.trust_remote_code is not True:
            raise UserError(
                f"model={self.model!r} runs Python code from its repository; read that code, then "
                "set trust_remote_code=True (and revision, so that it stays what you read)"
            )
        with explained("model", self.model, "DeQA-Score"):
            network = AutoModelForCausalLM.from_pretrained(
                self.model,
                revision=self.revision,
                trust_remote_code=True,
                attn_implementation="eager",
                **{DTYPE: self.torch_dtype},
            )
        if not hasattr(network, "score"):
            raise UserError(
                f"model={self.model!r} is a {type(network).__name__} without the method `score` "
                "of DeQA-Score; name that model or a copy of it"
            )
        return network

    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        raw = self.network.score(images).float()
        return {SCORE: raw / BEST, "raw": raw}
