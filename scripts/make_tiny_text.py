"""Makes the small language model and its sums that ship: what assets/tiny-vlm has without its eyes.

python scripts/make_tiny_text.py
"""

import json
import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3VLForConditionalGeneration

ROOT = Path(__file__).parents[1]
SEEING, READING = ROOT / "assets/tiny-vlm", ROOT / "assets/tiny-text"
SHAPES, SUMS = ROOT / "dataset/shapes_qa", ROOT / "dataset/sums"


def make_model() -> Qwen3ForCausalLM:
    """Qwen3-VL's language model is a Qwen3: its three axes of positions are alike for text."""
    seeing = Qwen3VLForConditionalGeneration.from_pretrained(SEEING, dtype=torch.float32)
    settings = seeing.config.text_config.to_dict()
    rope = settings.pop("rope_parameters")
    settings["rope_parameters"] = {name: rope[name] for name in ("rope_theta", "rope_type")}
    del settings["model_type"]
    model = Qwen3ForCausalLM(Qwen3Config(**settings))
    model.model.load_state_dict(seeing.model.language_model.state_dict())
    model.generation_config = seeing.generation_config
    return model


def main() -> None:
    make_model().half().save_pretrained(READING)
    config = READING / "config.json"  # trained in float32, as the weights are of tiny-vlm
    config.write_text(config.read_text().replace("float16", "float32"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SEEING / name, READING / name)
    SUMS.mkdir(exist_ok=True)
    for split in ("train", "test"):
        rows = map(json.loads, (SHAPES / f"{split}.jsonl").read_text().splitlines())
        told = [{"question": r["question"], "answer": r["answer"]} for r in rows if not r["images"]]
        (SUMS / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))


if __name__ == "__main__":
    main()
