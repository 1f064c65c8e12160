"""HTTP service that scores images: `python -m reward_server --rewards ocr --port 18085`.

It needs neither torch nor diffusers itself, so it can live in an environment of its own, beside
whatever its rewards need.
"""
