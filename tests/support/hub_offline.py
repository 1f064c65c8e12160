"""Disable requests to the Hugging Face hub; import it before `huggingface_hub`.

Without a network, each request would be repeated for 23 seconds.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
