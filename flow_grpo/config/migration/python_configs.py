"""Read the settings of a Flow-GRPO config file without executing it.

Such a file has one function per preset, which calls another one or `base.get_config()` and then
assigns literals and simple expressions to attributes of the config. Only these are evaluated; any
other statement is reported.
"""

import ast
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError, did_you_mean, did_you_mean_file

MAX_FILE_BYTES = 2**20
MAX_DEPTH = 20  # of calls and of nested expressions
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "max": max,
    "min": min,
    "round": round,
    "os.getcwd": lambda: "",
    "os.path.join": os.path.join,
}


class NotEvaluated(Exception):
    """The expression is not one of those that are evaluated."""


@dataclass(frozen=True)
class Section:
    """A variable that holds the config or one of its sections."""

    prefix: str


@dataclass(frozen=True)
class PythonConfig:
    """The settings of a preset.

    Attributes:
        settings: Values by their full names.
        skipped: Statements that were not evaluated, as "line N: text".
    """

    settings: dict[str, Any]
    skipped: tuple[str, ...]


def read_python_config(path: Path, preset: str) -> PythonConfig:
    """Return the settings that a preset of a config file assigns, without executing the file.

    Args:
        path: The file; `base.py` next to it provides `base.get_config()`.
        preset: Name of the function.

    Raises:
        UserError: If the file cannot be read or has no such preset.
    """
    functions = _functions(path)
    if preset not in functions:
        hint = did_you_mean(preset, functions) or f"known: {', '.join(sorted(functions))}"
        raise UserError(f"has no preset {preset!r}", field=path, hint=hint)
    base = path.with_name("base.py")
    if base.is_file() and base != path:
        functions["base.get_config"] = _functions(base).get("get_config")
    reader = _Reader({name: each for name, each in functions.items() if each})
    reader.call(preset)
    return PythonConfig(reader.settings, tuple(reader.skipped))


def _functions(path: Path) -> dict[str, ast.FunctionDef | None]:
    """Parse a Python file and return its top-level functions by name."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"is larger than {MAX_FILE_BYTES} bytes", field=path)
        tree = ast.parse(path.read_text("utf-8"))
    except OSError as error:
        hint = did_you_mean_file(path, "*.py")
        raise UserError(f"cannot be read: {error.strerror}", field=path, hint=hint) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"is not Python: {error}", field=path) from error
    return {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}


class _Reader:
    """Evaluates the assignments of a function and of those it calls.

    Args:
        functions: The functions of the file by their names.
    """

    def __init__(self, functions: dict[str, ast.FunctionDef]) -> None:
        self.functions = functions
        self.settings: dict[str, Any] = {}
        self.skipped: list[str] = []
        self.depth = 0

    def call(self, name: str) -> Section:
        """Evaluate a function, which returns the config.

        Statements that cannot be evaluated are added to `skipped`.
        """
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UserError(f"function {name} calls itself")
        variables: dict[str, Any] = {}
        for statement in self.functions[name].body:
            if isinstance(statement, ast.Return):
                break
            try:
                self._execute(statement, variables)
            except (NotEvaluated, ArithmeticError, TypeError, ValueError, RecursionError):
                text = ast.unparse(statement).splitlines()[0]
                self.skipped.append(f"line {statement.lineno}: {text}")
        self.depth -= 1
        return Section("")

    def _execute(self, statement: ast.stmt, variables: dict[str, Any]) -> None:
        """Evaluate an assignment; update the settings or `variables`. Imports are ignored."""
        if isinstance(statement, ast.Assert | ast.Import | ast.Pass):
            return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        if not isinstance(statement, ast.Assign):
            raise NotEvaluated
        is_section = _dotted(getattr(statement.value, "func", None)).endswith("ConfigDict")
        value = None if is_section else self.evaluate(statement.value, variables)
        prefix = ""
        for target in statement.targets:
            if isinstance(target, ast.Attribute):
                name = self._full_name(target, variables)
                prefix = f"{name}."
                if not is_section:
                    self.settings[name] = value
        for target in statement.targets:
            if isinstance(target, ast.Name):
                variables[target.id] = Section(prefix) if is_section else value
            elif not isinstance(target, ast.Attribute):
                raise NotEvaluated

    def _full_name(self, node: ast.Attribute, variables: dict[str, Any]) -> str:
        """Return the name of a setting, such as sample.num_steps for config.sample.num_steps."""
        root, _, name = _dotted(node).partition(".")
        section = variables.get(root)
        if not name or not isinstance(section, Section):
            raise NotEvaluated
        return section.prefix + name

    def evaluate(self, node: ast.expr, variables: dict[str, Any]) -> Any:
        """Return the value of an expression."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in variables:
            return variables[node.id]
        if isinstance(node, ast.Attribute):
            return self._value_of_setting(self._full_name(node, variables))
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self.evaluate(each, variables) for each in node.elts)
        if isinstance(node, ast.Dict) and all(node.keys):
            keys = [self.evaluate(each, variables) for each in node.keys if each]
            return dict(
                zip(keys, (self.evaluate(each, variables) for each in node.values), strict=True)
            )
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.evaluate(node.operand, variables)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return self._binary(node, variables)
        if isinstance(node, ast.IfExp):
            chosen = node.body if self.evaluate(node.test, variables) else node.orelse
            return self.evaluate(chosen, variables)
        if (
            isinstance(node, ast.Compare)
            and len(node.ops) == 1
            and type(node.ops[0]) in COMPARISONS
        ):
            left, right = (self.evaluate(n, variables) for n in (node.left, node.comparators[0]))
            return COMPARISONS[type(node.ops[0])](left, right)
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(each, "value", None) for each in node.values)
            return "".join(str(self.evaluate(each, variables)) for each in parts_of(parts))
        if isinstance(node, ast.Call):
            return self._call_of(node, variables)
        raise NotEvaluated

    def _value_of_setting(self, name: str) -> Any:
        if name not in self.settings:
            raise NotEvaluated
        return self.settings[name]

    def _binary(self, node: ast.BinOp, variables: dict[str, Any]) -> Any:
        """Return the value of arithmetic on numbers or of a string concatenation."""
        left, right = self.evaluate(node.left, variables), self.evaluate(node.right, variables)
        both_numbers = all(isinstance(each, int | float) for each in (left, right))
        both_text = isinstance(node.op, ast.Add) and type(left) is type(right) is str
        if not both_numbers and not both_text:
            raise NotEvaluated
        return OPERATORS[type(node.op)](left, right)

    def _call_of(self, node: ast.Call, variables: dict[str, Any]) -> Any:
        """Return the value of a call: a preset function, `base.get_config` or a known function."""
        name = _dotted(node.func)
        if name in self.functions and not node.args:
            return self.call(name)
        if name == "base.get_config":
            self.skipped.append(f"line {node.lineno}: {name}(), as there is no base.py next to it")
            return Section("")
        if name not in FUNCTIONS or node.keywords:
            raise NotEvaluated
        return FUNCTIONS[name](*(self.evaluate(each, variables) for each in node.args))


def parts_of(parts: Any) -> list[ast.expr]:
    """Return the parts of an f-string as expressions."""
    return [each if isinstance(each, ast.expr) else ast.Constant(each) for each in parts]


def _dotted(node: Any) -> str:
    """Return a name with its attributes, such as "os.path.join", or ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        root = _dotted(node.value)
        return root and f"{root}.{node.attr}"
    return ""
