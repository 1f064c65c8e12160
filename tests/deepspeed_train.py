"""scripts/train.py without the kernel that DeepSpeed would compile first, for minutes: CPUs need it
for inference alone."""

import runpy
import sys

import deepspeed

deepspeed.ops.__compatible_ops__ = {}
sys.path[0] = "scripts"
runpy.run_path("scripts/train.py", run_name="__main__")
