import os

__version__ = "0.1.0"

# transformers and diffusers speak, at import, of packages that are missing and not needed here.
# Their errors still show; set these variables to see more.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")


def __getattr__(name: str):
    """Not imported before they are asked for: they need torch."""
    if name in ("Trainer", "evaluate"):
        from flow_grpo import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
