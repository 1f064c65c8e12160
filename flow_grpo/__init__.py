import os

__version__ = "0.1.0"

# Silence warnings of transformers and diffusers about optional packages; errors are still shown.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")


def __getattr__(name: str):
    """Import the Python API, which needs torch, on first access."""
    if name in ("Trainer", "evaluate"):
        from flow_grpo import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
