"""What an epoch of TRL's GRPOTrainer costs, at the settings of scripts/benchmark_vlm.py.

    pip install trl
    PYTHONPATH=.:scripts python tests/gpu/trl_cost.py --shape qwen2.5-vl-3b

The same model with random weights, the same lengths, groups and LoRA; generation by transformers,
as TRL does it without vLLM. Prints one line of JSON.
"""

import argparse
import json
import tempfile
import time

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from trl import GRPOConfig, GRPOTrainer
from untrained.answering import MARKS, SHAPES, build

from flow_grpo.answer.models.qwen_vl import QwenVL

SPECIAL = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": MARKS["vision_start_token_id"],
    "<|vision_end|>": MARKS["vision_end_token_id"],
    "<|image_pad|>": MARKS["image_token_id"],
    "<|video_pad|>": MARKS["video_token_id"],
}
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endfor %}"
)


def build_processor() -> Qwen2_5_VLProcessor:
    """With a thousand words, and special tokens where the model has them."""
    words = {f"w{i}": i for i in range(1000)}
    tokenizer = Tokenizer(models.WordLevel({**words, **SPECIAL}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL)[3:],
    )
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=fast,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    )


def build_data(questions: int, words: int, side: int) -> Dataset:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(questions):
        text = " ".join(f"w{i}" for i in rng.integers(10, 1000, words))
        picture = Image.fromarray(rng.integers(256, size=(side, side, 3), dtype="u1"))
        content = [{"type": "image"}, {"type": "text", "text": text}]
        rows.append({"prompt": [{"role": "user", "content": content}], "images": [picture]})
    return Dataset.from_list(rows)


class Timed(GRPOTrainer):
    """Notes the seconds of each generation and of each step after it."""

    def __init__(self, *args, **settings) -> None:
        self.spent: dict[str, list[float]] = {"sample": [], "step": []}
        self.peak: dict[str, float] = {}
        super().__init__(*args, **settings)

    def _note(self, name: str, call, *args, **settings):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = call(*args, **settings)
        torch.cuda.synchronize()
        self.spent[name].append(time.perf_counter() - start)
        self.peak[name] = torch.cuda.max_memory_allocated() / 2**30
        return result

    def _generate_single_turn(self, *args, **settings):
        return self._note("sample", super()._generate_single_turn, *args, **settings)

    def training_step(self, *args, **settings):
        before = len(self.spent["sample"])
        result = self._note("step", super().training_step, *args, **settings)
        if len(self.spent["sample"]) > before:  # which happens within the first step of a batch
            self.spent["step"][-1] -= self.spent["sample"][-1]
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-vl-3b")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--text_tokens", type=int, default=128)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--new_tokens", type=int, default=512)
    parser.add_argument("--micro_batch", type=int, default=8, help="answers of a backward pass")
    parser.add_argument("--epochs", type=int, default=2, help="the last one counts")
    args = parser.parse_args()
    model = build(args.shape, torch.device("cuda"), torch.bfloat16)
    model.generation_config.eos_token_id = SPECIAL["<|im_end|>"]
    steps = args.answers // args.micro_batch
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=steps,
            num_generations=args.group,
            max_completion_length=args.new_tokens,
            max_steps=args.epochs,
            generation_kwargs={"min_new_tokens": args.new_tokens},  # none ends early
            temperature=1.0,
            top_k=0,
            learning_rate=1e-6,
            beta=0.0,
            bf16=True,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
        )
        trainer = Timed(
            model=model,
            reward_funcs=lambda completions, **_: torch.rand(len(completions)).tolist(),
            args=config,
            train_dataset=build_data(args.answers // args.group, args.text_tokens, args.side),
            processing_class=build_processor(),
            peft_config=LoraConfig(r=32, lora_alpha=64, target_modules=QwenVL.layers),
        )
        trainer.train()
    sampling, training = trainer.spent["sample"][-1], sum(trainer.spent["step"][-steps:])
    print(
        json.dumps(
            {
                "sampling_s_per_answer": sampling / args.answers,
                "sampling_gib": trainer.peak["sample"],
                "training_s_per_answer": training / args.answers,
                "training_gib": trainer.peak["step"],
                "spent": trainer.spent,
            }
        )
    )


if __name__ == "__main__":
    main()
