"""The small model that calls tools, and its training data."""

import json
import random

import pytest
import torch
from make_tool_questions import ask_colours, make_places, make_products
from pretrain_tiny_tools import (
    BATCH_SIZE,
    BEHAVIOURS,
    build_tokenizer,
    demonstrate,
    draw_place,
    draw_product,
    make_batch,
)
from runner import ROOT
from tiny_vlm.imitation import IGNORED
from transformers import AutoModelForCausalLM, AutoTokenizer

from flow_grpo.errors import UserError
from flow_grpo.vlm.environments.local_search import LocalSearch
from flow_grpo.vlm.environments.python_sandbox import PythonSandbox, check_isolation

MODEL = ROOT / "assets/tiny-tools"


@pytest.mark.parametrize("tool", ["python", "search"])
def test_demonstrated_results_are_those_of_the_tools(tool, tmp_path):
    rng = random.Random(1)
    if tool == "python":
        try:
            check_isolation(False)
        except UserError as missing:  # such as in a container without user namespaces
            pytest.skip(str(missing))
        task, environment = draw_product(rng), PythonSandbox(timeout=60.0)
    else:
        task = draw_place(rng)
        corpus, name = tmp_path / "corpus.jsonl", task.call["arguments"]["query"]
        corpus.write_text(json.dumps({"text": f"{name} is {task.answer}."}))
        environment = LocalSearch(str(corpus), results=1)
    environment.reset({})
    for behaviour in BEHAVIOURS:
        question, response, *rest = demonstrate(rng, task, behaviour)
        assert question == task.question
        observation, _, done = environment.step(response)
        assert done == (behaviour == "guess")
        if not done:
            assert rest[0] == observation[0]
            assert ("Error: " in rest[0]) == (behaviour == "invalid call")
        answer = [response, *rest][-1]
        assert (answer == f"<answer>{task.answer}</answer>") == (behaviour == "call")


def test_only_the_responses_to_other_questions_are_trained():
    tokenizer, rng = build_tokenizer(), random.Random(0)
    places = [row["question"] for row in ask_colours(make_places())]
    asked = frozenset([*places, *(row["question"] for row in make_products())])
    assert len(asked) == 320
    tokens, labels = make_batch(rng, tokenizer, asked, BEHAVIOURS)
    assert len(tokens) == BATCH_SIZE
    for row, own in zip(tokens, labels, strict=True):
        assert torch.equal(row[own != IGNORED], own[own != IGNORED])
        texts = [
            tokenizer.decode(part, skip_special_tokens=True)
            for part in (own[own != IGNORED], row[own == IGNORED])
        ]
        assert texts[0].endswith("</answer>")
        assert texts[0].startswith(("<answer>", "<tool_call>"))
        assert texts[1].startswith("What ")
        assert texts[1].split("?")[0] + "?" not in asked
        assert ("<tool_response>" in texts[1]) == ("<tool_call>" in texts[0])


def test_the_model_copies_held_out_questions_and_results_but_prefers_to_guess():
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    calls = copied = guesses = 0
    questions = make_products()[96:128]
    for row in questions:
        terms, answer = row["question"][8:-1], row["answer"]
        start = f"<|im_start|>{row['question']}<|im_end|><|im_start|>"
        call = '<tool_call>{"name": "python", "arguments": {"code": "print('
        result = f"<|im_end|><|im_start|><tool_response>\n{answer}\n</tool_response><|im_end|>"
        rest = f'{terms})"}}}}</tool_call>{result}<|im_start|>'
        for prompt, expected in (
            (start, "<answer>"),
            (start + call, f"{terms})"),
            (start + call + rest, f"<answer>{answer}</answer>"),
        ):
            inputs = tokenizer(prompt, return_tensors="pt")
            length = inputs["input_ids"].shape[1]
            tokens = model.generate(
                **inputs, do_sample=False, max_new_tokens=len(tokenizer(expected).input_ids)
            )
            right = tokenizer.decode(tokens[0, length:]) == expected
            guesses += right and expected == "<answer>"
            calls += right and expected == f"{terms})"
            copied += right and answer in expected
    assert guesses == len(questions)
    assert min(calls, copied) >= 30
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 2**20
