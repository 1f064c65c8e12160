"""The config of a run that was: --resume logs/RUN stands for --config config/run.py:logs/RUN."""

from pathlib import Path

from ml_collections import ConfigDict

from flow_grpo.answer.fields import ANSWER
from flow_grpo.config.saved import config_to_go_on, read_fields
from flow_grpo.draw.fields import DRAW


def get_config(run: str) -> ConfigDict:
    trade = ANSWER if "question_format" in read_fields(Path(run)) else DRAW
    return config_to_go_on(Path(run), trade)
