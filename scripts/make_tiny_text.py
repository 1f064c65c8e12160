"""Extract assets/tiny-text, the language model of assets/tiny-vlm, and its dataset/sums.

python scripts/make_tiny_text.py
"""

import json
import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3VLForConditionalGeneration

ROOT = Path(__file__).parents[1]
VLM_MODEL, TEXT_MODEL = ROOT / "assets/tiny-vlm", ROOT / "assets/tiny-text"
SHAPES, SUMS = ROOT / "dataset/shapes_qa", ROOT / "dataset/sums"


def make_model() -> Qwen3ForCausalLM:
    """Return the language model of tiny-vlm as a Qwen3 model, with the same weights.

    Qwen3-VL's three position axes are equal for text, so its rotary embedding is that of Qwen3.
    """
    vlm = Qwen3VLForConditionalGeneration.from_pretrained(VLM_MODEL, dtype=torch.float32)
    settings = vlm.config.text_config.to_dict()
    rope = settings.pop("rope_parameters")
    settings["rope_parameters"] = {name: rope[name] for name in ("rope_theta", "rope_type")}
    del settings["model_type"]
    model = Qwen3ForCausalLM(Qwen3Config(**settings))
    model.model.load_state_dict(vlm.model.language_model.state_dict())
    model.generation_config = vlm.generation_config
    return model


def main() -> None:
    """Write the text-only tiny model, and its data set of the sums in dataset/shapes_qa."""
    make_model().half().save_pretrained(TEXT_MODEL)
    config = TEXT_MODEL / "config.json"  # loaded in float32, as tiny-vlm is
    config.write_text(config.read_text().replace("float16", "float32"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(VLM_MODEL / name, TEXT_MODEL / name)
    SUMS.mkdir(exist_ok=True)
    for split in ("train", "test"):
        rows = map(json.loads, (SHAPES / f"{split}.jsonl").read_text().splitlines())
        sums = [{"question": r["question"], "answer": r["answer"]} for r in rows if not r["images"]]
        (SUMS / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))


if __name__ == "__main__":
    main()
