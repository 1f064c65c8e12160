from setuptools import find_packages, setup

OCR = ["rapidocr>=3.10", "onnxruntime>=1.20", "Levenshtein>=0.25"]
# versions before 4 run code that comes with a dataset
DATA = ["datasets>=4.0", "pyarrow>=21.0"]
SERVER = ["fastapi>=0.115", "prometheus-client>=0.20", "uvicorn[standard]>=0.30"]

setup(
    name="flow_grpo",
    version="0.1.0",
    description="Online reinforcement learning for flow-matching image models",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["flow_grpo", "flow_grpo.*", "reward_server"]),
    package_data={"reward_server": ["openapi.json"]},
    install_requires=[
        "absl-py>=2.1",
        "accelerate>=1.10",
        "diffusers>=0.42",
        "ml-collections>=1.0",
        "numpy>=1.26",
        "peft>=0.17",
        "pillow>=10",
        "psutil>=5.9",
        "requests>=2.31",
        # An open upper bound makes pip fetch the newest CUDA build, untested here.
        "torch>=2.6,<2.14",
        "tqdm>=4.66",
        "transformers>=5.0",
    ],
    extras_require={
        "adam8bit": ["bitsandbytes>=0.45"],
        # parquet files and Hugging Face datasets of prompts
        "data": DATA,
        "deepspeed": ["deepspeed>=0.16"],
        "tensorboard": ["tensorboard>=2.16"],
        "wandb": ["wandb>=0.18"],
        "ocr": OCR,
        "server": SERVER,
        # reads its own models without paddlepaddle, through onnxruntime
        "paddleocr": ["paddleocr>=3.7", "onnxruntime>=1.20", "Levenshtein>=0.25"],
        # draws curves, and the fonts of the small model's training pictures
        "plot": ["matplotlib>=3.9"],
        "test": [
            *DATA,
            *OCR,
            *SERVER,
            "deepspeed>=0.16",
            "hypothesis>=6.100",
            "matplotlib>=3.9",
            "mutmut>=3.8,<4",
            "openai>=1.99",  # `transformers serve`, which the judges are tested with
            "pytest>=8",
            "pytest-xdist>=3.5",
            "ruff>=0.9",
            "schemathesis>=4.0",
            "tensorboard>=2.16",
        ],
    },
)
