"""Invalid command lines and config files.

Each is a one-line error with the value and a hint, the exit code is 2, and nothing is written.
"""

import os
import shlex

import pytest
from runner import list_repo_files, run_script

TRAIN = "scripts/train.py --config=config/grpo.py:tiny_ocr --config.logdir=OUT/logs"
EVALUATE = "scripts/evaluate.py --config=config/grpo.py:tiny_ocr"
BENCHMARK = "scripts/benchmark.py --config.device=cpu"
COMPARE = "scripts/compare.py --out OUT/figure --logdir OUT/logs"

COMMANDS = [  # command, invalid value, hint
    ("scripts/train.py", "--config is missing", "such as --config config/grpo.py:tiny_ocr"),
    (
        "scripts/train.py --config.num_epochs=3",
        "--config is missing",
        "such as --config config/grpo",
    ),
    ("scripts/train.py --config=config/grpo.py:tiny_orc", "'tiny_orc'", "mean tiny_ocr?"),
    ("scripts/train.py --config=config/grpo.py", "preset", "tiny_ocr, "),
    ("scripts/train.py --config=config/none.py", "config/none.py", "No such file"),
    (
        "scripts/train.py --config=config/grpo.py:tiny_ocr_8gpu",
        "'tiny_ocr_8gpu' is for 8 GPUs, but one process was started",
        "start it with torchrun or accelerate launch, or omit the suffix _8gpu",
    ),
    (f"{TRAIN} --learning_rate=1e-4", "--learning_rate", "--config.train.learning_rate=1e-4?"),
    (f"{TRAIN} --dryrun", "unknown option --dryrun", "did you mean --dry_run?"),
    (f"{TRAIN} -lr=1e-4", "'lr'", "--help lists all"),
    (f"{TRAIN} num_epochs=3", "'num_epochs=3'", "settings start with --config."),
    (f"{TRAIN} --config.num_epochs=1.5", "num_epochs=1.5", "must be a whole number"),
    (f"{TRAIN} --config.train.ema=maybe", "train.ema=maybe", "must be True or False"),
    (f"{TRAIN} --config.reward_fn=ocr", "reward_fn=ocr", "must be a dict like {'ocr': 1.0}"),
    (f"{TRAIN} --config.reward_fn=\"{{'ocr': one}}\"", "{'ocr': one} must", "like {'ocr': 1.0}"),
    (f"{TRAIN} --config.resume_from=logs/a", "'resume_from'", "it is called resume here"),
    (f"{TRAIN} --config.algorithm=ppo", "algorithm='ppo'", "must be one of 'awm', 'dgpo'"),
    (f"{TRAIN} --config.train.batch_size=7", "train.batch_size=7", "use a divisor"),
    (f"{TRAIN} --config.dataset=dataset/orc", "dataset/orc", "did you mean dataset/ocr?"),
    (
        f"{TRAIN} --config.reward_options.ocr.engin=rapidocr",
        "'reward_options.ocr.engin'",
        "did you mean --config.reward_options=\"{'ocr': {'engine': 'rapidocr'}}\"?",
    ),
    (f"{TRAIN} --config.pretrained.model=tiny-sd3", "model='tiny-sd3'", "or a hub id (owner/name)"),
    (f"{TRAIN} --config.resume=logs/none", "resume='logs/none'", "directory of one"),
    (f"{TRAIN} --config.resume=auto", "resume='auto'", "run_name"),
    ("scripts/train.py --resume=logs/none", "no run at logs/none", "no such directory"),
    (f"{TRAIN} --resume=logs/none", "--resume=logs/none", "omit one"),
    (
        "scripts/train_vlm.py --resume logs/none --config.run_name=b",
        "--resume=logs/none",
        "omit it, or start a new run from its state: --config.resume=logs/none",
    ),
    (f"{EVALUATE}", "--out is missing", "directory for the results"),
    (f"{EVALUATE} --out=docs", "docs already exists", "choose another --out or remove it"),
    (f"{EVALUATE} --out=OUT/e --checkpoint=docs/none", "docs/none", "a path or a hub id"),
    (f"{EVALUATE} --out=OUT/e --checkpont=base", "--checkpont", "mean --checkpoint=base?"),
    (f"{EVALUATE} --out=OUT/e --checkpoint=base,base", "--checkpoint='base' ", "leave one out"),
    (f"{BENCHMARK}", "sd3.5-medium' needs a GPU", "--model assets/tiny-sd3"),
    (f"{BENCHMARK} --model=sd3.5-medum", "--model='sd3.5-medum'", "did you mean sd3.5-medium?"),
    (f"{EVALUATE} --out=OUT/e --resume=logs/a", "unknown option --resume", "did you mean"),
    (
        f"{EVALUATE} --out=OUT/e --config.sample.num_steps=4",
        "--config.sample.num_steps has no effect",
        "set --config.sample.eval_num_steps",
    ),
    (
        "scripts/evaluate.py --out=OUT/e --checkpoint=logs/none",
        "--checkpoint='logs/none'",
        "--config config/grpo.py:tiny_ocr",
    ),
    (
        "scripts/benchmark.py --config=config/vlm.py:tiny_vlm",
        "benchmark.py is for diffusion models",
        "use scripts/benchmark_vlm.py",
    ),
    (f"{BENCHMARK} --epochs=0", "--epochs=0", "is not a positive integer"),
    (
        f"{BENCHMARK} --model=assets/tiny-sd3 --out=OUT/b.jsonl --config.sample.num_steps=0",
        "num_steps=0",
        "must be at least 1",
    ),
    (f"{BENCHMARK} --model=assets/tiny-sd3 --out=docs", "--out='docs'", "choose another file"),
    ("scripts/plot.py", "required: command", "see --help"),
    ("scripts/plot.py curv logs/a", "'curv'", "choose from"),
    ("scripts/plot.py curve logs/none --out=OUT/new/a.png", "logs/none", "a run directory or a"),
    ("scripts/plot.py pictures docs --out=OUT/new/a.png", "docs/samples.jsonl", "a run's samples/"),
    (
        "scripts/plot.py curve docs/results/tiny_awm_cpu_seed1.jsonl --out=OUT/a.xyz",
        "OUT/a.xyz",
        "--out",
    ),
    ("scripts/export.py", "required: --checkpoint, --out", "see --help"),
    ("scripts/export.py --checkpoint=docs/none --out=OUT/e", "docs/none", "a run, a checkpoint"),
    ("scripts/export.py --checkpoint=a --out=OUT/e --dtype=int8", "'int8'", "choose from"),
    (f"{COMPARE} tiny_orc --seeds 1", "'tiny_orc'", "did you mean tiny_ocr?"),
    (f"{COMPARE} tiny_ocr", "--seeds=[]", "one or more"),
    (f"{COMPARE} tiny_ocr --seeds one", "--seeds", "invalid int value: 'one'"),
    (f"{COMPARE} tiny_ocr --seeds 1 --config.num_epoch=3", "'num_epoch'", "mean num_epochs?"),
    (f"{COMPARE} tiny_ocr --seeds 1 --no-train", "OUT/logs/tiny_ocr-1", "a run directory or a"),
    ("scripts/make_small.py flax OUT/model", "'flax'", "choose from"),
    ("scripts/make_small.py flux docs", "docs already exists", "new directory"),
    ("scripts/make_ocr.py huge --out=OUT/d", "'huge'", "choose from"),
    ("scripts/make_ocr.py full --size=1 --out=OUT/d", "--size=1", "must be from 2 to 100000"),
    ("scripts/make_ocr.py full --words=none.txt --out=OUT/d", "none.txt", "as UTF-8 text"),
    ("scripts/make_ocr.py full --out=setup.py/d", "--out=setup.py/d", "Not a directory"),
    ("flow_grpo/config/command.py trian", "'trian'", "did you mean train?"),
    (
        "flow_grpo/config/command.py evaluate --config=config/none.py",
        "config/none.py",
        "No such file",
    ),
]

BASE = "from flow_grpo.diffusion.presets import get_config as preset\n\ndef get_config():\n"
CONFIGS = [  # config file, invalid value, hint
    ("config = 1\n", "mine.py", "has no attribute 'get_config'"),
    ("def get_config(:\n", "mine.py", "SyntaxError"),
    (f"{BASE}    return None\n", "mine.py must return a ConfigDict", "not NoneType"),
    (f"{BASE}    return preset('tiny_orc')\n", "'tiny_orc'", "did you mean tiny_ocr?"),
    (
        f"{BASE}    c = preset('tiny_ocr')\n    c.train.learning_rat = 1\n    return c\n",
        "train.learning_rat",
        "did you mean train.learning_rate?",
    ),
    (
        f"{BASE}    c = preset('tiny_ocr')\n    c.save_dir = 'logs'\n    return c\n",
        "save_dir",
        "it is called logdir here",
    ),
    (
        f"{BASE}    c = preset('tiny_ocr')\n    c.train.learning_rate = 'fast'\n    return c\n",
        "(line 5): TypeError",
        "'learning_rate'",
    ),
    (
        f"{BASE}    c = preset('tiny_ocr')\n    c.sample.sde_type = 'flwo'\n    return c\n",
        "sample.sde_type='flwo'",
        "did you mean flow?",
    ),
    (
        f"{BASE}    c = preset('tiny_ocr')\n    del c.train.beta\n    return c\n",
        "missing settings: train.beta",
        "start from a preset, such as flow_grpo.diffusion.presets.get_config('tiny_ocr')",
    ),
    (
        f"{BASE}    c = preset('tiny_ocr')\n    c.reward_fn = {{'orc': 1.0}}\n    return c\n",
        "unknown reward 'orc'",
        "did you mean ocr?",
    ),
]


def assert_rejected(command: str, folder, *parts: str) -> None:
    before = set(os.listdir(folder)), list_repo_files()
    done = run_script(*shlex.split(command.replace("OUT", str(folder))))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part.replace("OUT", str(folder)).lower() in line.lower()
    assert (set(os.listdir(folder)), list_repo_files()) == before


def test_the_commands_cover_many_scripts():
    assert len(COMMANDS) + len(CONFIGS) >= 20
    scripts = {command.split()[0] for command, *_ in COMMANDS}
    assert len(scripts) >= 9


@pytest.mark.parametrize(("command", "value", "hint"), COMMANDS, ids=[c for c, *_ in COMMANDS])
def test_an_invalid_command_line_is_rejected(tmp_path, command, value, hint):
    assert_rejected(command, tmp_path, value, hint)


@pytest.mark.parametrize(
    ("text", "value", "hint"), CONFIGS, ids=[f"{w} {o}" for _, w, o in CONFIGS]
)
def test_an_invalid_config_file_is_rejected(tmp_path, text, value, hint):
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "__pycache__").mkdir()
    command = "scripts/train.py --config=OUT/mine.py"
    assert_rejected(command, tmp_path, value, hint)
