"""How the parts of the library may lean on each other."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from untrained.small import FAMILIES

from flow_grpo.draw.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "flow_grpo").rglob("*.py"))
}
PURE = ("sde", "advantages", "windows", "losses")


def imports_of(path: Path) -> Iterator[str]:
    """Modules of ours that are imported when this one is: not in functions, nor for types alone."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name in FILES)


def test_no_module_imports_itself_on_the_way():
    graph = {name: set(imports_of(path)) - {name} for name, path in FILES.items()}
    assert len(graph) > 50
    order = list(TopologicalSorter(graph).static_order())  # raises where there is a circle
    assert set(order) == set(FILES)


def test_the_maths_imports_nothing_of_ours():
    for name in PURE:
        assert not list(imports_of(FILES[f"flow_grpo.{name}"])), name


def test_the_loop_names_no_algorithm_and_no_model():
    text = (ROOT / "scripts/train.py").read_text("utf-8")
    code = text.replace(ast.get_docstring(ast.parse(text), clean=False), "").lower()
    for name in (*ALGORITHMS, *FAMILIES):
        assert not re.search(rf"\b{name}\b", code.replace("flow_grpo", "")), name


def test_models_are_named_in_their_folder_alone():
    """And in the names of presets, which are made for them."""
    pattern = re.compile(rf"\b({'|'.join(FAMILIES)}|{'|'.join(FAMILIES).replace('_', '')})\b", re.I)
    named = {
        name
        for name, path in FILES.items()
        if not name.startswith(("flow_grpo.draw.models", "flow_grpo.draw.presets"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Name | ast.Attribute | ast.Import | ast.ImportFrom)
        if pattern.search(ast.unparse(node))
    }
    assert not named


def test_picture_files_are_opened_in_one_place():
    """Which knows the formats that are safe, and how many pixels are too many."""
    openers = ("Image.open", "imread", "load_image")
    paths = [p for f in ("flow_grpo", "reward_server", "scripts") for p in (ROOT / f).rglob("*.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}
    opened = {
        path
        for path, text in texts.items()
        if any(opener in text for opener in openers)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(openers)
    }
    assert opened == {"flow_grpo/pictures.py"}


def test_no_loader_leaves_it_to_a_question_whether_code_may_run():
    """Of transformers' Auto classes, which look for it."""
    for path in [p for f in ("flow_grpo", "scripts") for p in (ROOT / f).rglob("*.py")]:
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"\bAuto\w+\.from_pre", text) else ():
            if isinstance(node, ast.Call) and re.match(
                r"Auto[A-Z]\w+\.from_pretrained\(", call := ast.unparse(node)
            ):
                assert "trust_remote_code=" in call, f"{path}: {call}"


def test_every_docstring_stands_by_itself():
    """And does not go on from the name of its function with "Of"."""
    folders = ("config", "dataset", "flow_grpo", "reward_server", "scripts")
    for path in [p for f in folders for p in (ROOT / f).rglob("*.py")]:
        assert '"""Of ' not in path.read_text("utf-8"), path
