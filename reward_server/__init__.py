"""HTTP scoring service: `python -m reward_server --rewards ocr --port 18085`.

It needs neither torch nor diffusers, so it can run in a separate environment with only the
dependencies of its rewards.
"""
