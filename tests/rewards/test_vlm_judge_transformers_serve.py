"""A judge with a real server, `transformers serve`, and a real model.

The model is a LLaVA of 50 thousand parameters, trained here for some seconds to recognize whether
an image has the color that the prompt names.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
import torch
from PIL import Image

from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.rewards.judges.qwen_vl import QwenVl

pytest.importorskip("openai", reason="transformers serve needs it")

COLOURS = ["red", "green", "blue"]
PAIRS = [(shown, named) for shown in COLOURS for named in COLOURS]
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "Score:", "1", "5", *COLOURS]
QUESTION = "Is this {prompt} ?"  # learned faster than the default question
CHAT_TEMPLATE = (
    "{% for part in messages[0].content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}"
)


def plain_image(colour: str) -> Image.Image:
    return Image.new("RGB", (16, 16), colour)


def grade(shown: str, named: str) -> int:
    return 5 if shown == named else 1


def build_processor():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            additional_special_tokens=["<image>"],
        ),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def build_model():
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**size, image_size=16, patch_size=8, projection_dim=32),
        text_config=LlamaConfig(**size, **ids, vocab_size=len(WORDS), max_position_embeddings=512),
        image_token_index=WORDS.index("<image>"),
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    for weights in model.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.1)  # the usual 0.02 is for wider models
    return model


def train(model, processor, question: str) -> None:
    texts = [
        f"<image> {question.replace('{prompt}', named)} Score: {grade(shown, named)} </s>"
        for shown, named in PAIRS
    ]
    images = [plain_image(shown) for shown, _ in PAIRS]
    batch = processor(images=images, text=texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    labels[:, :-3] = -100  # only the reply
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(600):
        loss = model(**batch, labels=labels).loss
        if loss < 0.01:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the model did not learn its colours: loss {loss:.3f}")


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llava"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, processor = build_model(), build_processor()
        train(model, processor, QUESTION)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@contextmanager
def serve(model: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options = ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), *options],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 180
        while not is_up(url):
            assert process.poll() is None, "transformers serve ended"
            assert time.monotonic() < deadline, "transformers serve did not start"
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def is_up(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


@pytest.mark.slow
def test_a_judge_sees_image_and_prompt_through_a_real_server(llava):
    with serve(llava) as url:
        options = {"url": url, "model": str(llava), "question": QUESTION}
        judge = QwenVl(**options, policy=FailurePolicy(retries=0, timeout=60.0))
        judge.check_servers()
        images = [plain_image(shown) for shown, _ in PAIRS]
        scores, extras = judge(images, [named for _, named in PAIRS], [{}] * len(PAIRS))
        [truncated], _ = QwenVl(**options, max_tokens=1)(images[:1], ["red"], [{}])
    assert extras["raw"] == [grade(*pair) for pair in PAIRS]
    assert scores == [grade(*pair) / 5 for pair in PAIRS]
    assert "max_tokens" in truncated.reason
