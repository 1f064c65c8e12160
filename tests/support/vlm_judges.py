"""Judges based on vision-language models, connected to scripted servers."""

import pytest
from openai_server import MODEL
from PIL import Image
from sign_images import prompt

from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.rewards.judges.edit_score import EditScore
from flow_grpo.rewards.judges.qwen_vl import QwenVl, QwenVlOcr
from flow_grpo.rewards.judges.unified_reward import UnifiedReward
from flow_grpo.rewards.judges.vie_score import VieScore

BLANK = Image.new("RGB", (96, 32))
JUDGES = [
    ("QwenVlOcr", QwenVlOcr, "QWEN_VL_OCR_VLLM_URL", "QWEN_VL_OCR_PATH"),
    ("QwenVl", QwenVl, "QWEN_VL_VLLM_URL", "QWEN_VL_PATH"),
    ("UnifiedReward", UnifiedReward, "UNIFIED_REWARD_VLLM_URL", "UNIFIED_REWARD_PATH"),
    ("EditScore", EditScore, "EDITSCORE_URL", "EDITSCORE_MODEL"),
    ("VieScore", VieScore, "VIESCORE_URL", "VIESCORE_MODEL"),
]
every_judge = pytest.mark.parametrize(
    ("judge", "url_env", "model_env"), [each[1:] for each in JUDGES], ids=[j[0] for j in JUDGES]
)
ANY_RESPONSE = "Success: 3\nKept: 3\nNaturalness: 3\nCleanness: 3\nFinal Score: 3\n{score: [5, 6]}"
AXES_RESPONSE = "Alignment Score (1-5): 4\nCoherence Score (1-5): 2.5\nStyle Score (1-5): 1"


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr("flow_grpo.rewards.failure.FIRST_DELAY", 0.01)


@pytest.fixture(autouse=True)
def clear_environment(monkeypatch):
    for _, _, url_env, model_env in JUDGES:
        monkeypatch.delenv(url_env, raising=False)
        monkeypatch.delenv(model_env, raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def connect(judge, *servers, retries: int = 2, timeout: float = 10.0, **options):
    """Return a judge that sends its requests to these servers."""
    policy = FailurePolicy(retries=retries, timeout=timeout)
    url = ",".join(server.url for server in servers)
    return judge(url=url, model=MODEL, policy=policy, **options)


def score(judge, images=(BLANK,), prompts=None):
    images = list(images)
    prompts = [prompt("CAT")] * len(images) if prompts is None else prompts
    return judge(images, prompts, [{"source": BLANK} for _ in images])
