"""Dependencies between modules, and rules about where functions and names may be used."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from untrained.small import FAMILIES

from flow_grpo.diffusion.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "flow_grpo").rglob("*.py"))
}
PURE = ("sde", "advantages", "windows", "losses")


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules of this project imported at module level, except for type checking."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name in FILES)


def test_there_are_no_import_cycles():
    graph = {name: set(imports_of(path)) - {name} for name, path in FILES.items()}
    assert len(graph) > 50
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert set(order) == set(FILES)


def test_the_mathematics_imports_no_other_module():
    for name in PURE:
        assert not list(imports_of(FILES[f"flow_grpo.{name}"])), name


def test_the_loop_names_no_algorithm_and_no_model():
    text = (ROOT / "scripts/train.py").read_text("utf-8")
    code = text.replace(ast.get_docstring(ast.parse(text), clean=False), "").lower()
    for name in (*ALGORITHMS, *FAMILIES):
        assert not re.search(rf"\b{name}\b", code.replace("flow_grpo", "")), name


def test_models_are_named_in_their_package_only():
    """Except in presets."""
    pattern = re.compile(rf"\b({'|'.join(FAMILIES)}|{'|'.join(FAMILIES).replace('_', '')})\b", re.I)
    named = {
        name
        for name, path in FILES.items()
        if not name.startswith(("flow_grpo.diffusion.models", "flow_grpo.diffusion.presets"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Name | ast.Attribute | ast.Import | ast.ImportFrom)
        if pattern.search(ast.unparse(node))
    }
    assert not named


def test_image_files_are_opened_in_one_module():
    """It restricts formats and the number of pixels."""
    openers = ("Image.open", "imread", ".load_image", "import load_image")
    paths = [p for f in ("flow_grpo", "reward_server", "scripts") for p in (ROOT / f).rglob("*.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}
    opened = {
        path
        for path, text in texts.items()
        if any(opener in text for opener in ("Image.open", "imread", "load_image"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call | ast.ImportFrom)
        and ast.unparse(node.func if isinstance(node, ast.Call) else node).endswith(openers)
    }
    assert opened == {"flow_grpo/images.py"}


def test_auto_classes_never_prompt_for_remote_code():
    """transformers asks interactively unless `trust_remote_code` is passed."""
    for path in [p for f in ("flow_grpo", "scripts") for p in (ROOT / f).rglob("*.py")]:
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"\bAuto\w+\.from_pre", text) else ():
            if isinstance(node, ast.Call) and re.match(
                r"Auto[A-Z]\w+\.from_pretrained\(", call := ast.unparse(node)
            ):
                assert "trust_remote_code=" in call, f"{path}: {call}"


def test_files_for_a_gpu_import_existing_names():
    """CI does not run tests/gpu."""
    folders = [ROOT, ROOT / "scripts", ROOT / "tests/support", ROOT / "tests/gpu"]
    checked = 0
    for path in sorted((ROOT / "tests/gpu").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            parts = Path(*node.module.split("."))
            files = [f / name for f in folders for name in (f"{parts}.py", parts / "__init__.py")]
            own = next((file for file in files if file.exists()), None)
            for alias in node.names if own else ():
                checked += 1
                assert alias.name in names_in(own), f"{path.name}: {node.module}.{alias.name}"
    assert checked > 50


def names_in(path: Path) -> set[str]:
    """Return the names that a module defines or imports, and those of its submodules."""
    names = {each.stem for each in path.parent.iterdir()} if path.stem == "__init__" else set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.alias():
                names.add((node.asname or node.name).split(".")[-1])
    return names
