import os

# transformers and diffusers speak, at import, of packages that are missing and not needed here.
# Their errors still show; set these variables to see more.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
