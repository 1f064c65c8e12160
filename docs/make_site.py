"""Select the files of the mkdocs site, whose layout is the repository's so that links work in both.

mkdocs serve
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *("assets/tiny-sd3/README.md", "assets/tiny-sd3/samples.png"),
    *("assets/tiny-edit/README.md", "assets/tiny-edit/samples.png"),
    *("assets/tiny-video/README.md", "assets/tiny-video/samples.png"),
    *("assets/tiny-vlm/README.md", "assets/tiny-vlm/samples.png", "assets/tiny-text/README.md"),
    "assets/tiny-enhancer/README.md",
    "assets/tiny-tools/README.md",
    *("assets/tiny-zoom/README.md", "assets/tiny-zoom/samples.png"),
    "dataset/digits/images/24.png",
    *("examples/first_run.ipynb", "Dockerfile"),
    *("dataset/README.md", "reward_server/README.md", "reward_server/openapi.json"),
    *(f"flow_grpo/rewards/environments/{name}.txt" for name in ("deqa", "paddleocr")),
    *("flow_grpo/rewards/protocol.py", "tests/rewards/test_geneval_rules.py"),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    docs = [file for file in files if file.abs_src_path and file.src_dir == config.docs_dir]
    for file in docs:
        files.remove(file)
    for path in (*(f"docs/{file.src_uri}" for file in docs), *OUTSIDE):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files
