"""Config of an existing run: --resume logs/RUN is short for --config config/run.py:logs/RUN."""

from pathlib import Path

from ml_collections import ConfigDict

from flow_grpo.config.saved_config import load_resume_config, read_saved_fields
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.vlm.fields import VLM_SPEC


def get_config(run: str) -> ConfigDict:
    spec = VLM_SPEC if "question_format" in read_saved_fields(Path(run)) else DIFFUSION_SPEC
    return load_resume_config(Path(run), spec)
