"""The small changes of a module that a mutation run makes (`tests/mutants.py`)."""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, order=True)
class Mutant:
    """One change: the bytes from `start` to `end` of a module become `text`."""

    module: str
    line: int
    what: str
    start: int
    end: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}  {self.what}"

    def apply(self, source: bytes) -> bytes:
        """The module with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(module: str, source: bytes) -> list[Mutant]:
    """Every change of this module that is known here, in the order of the lines."""
    return sorted(set(_Finder(module, source).found))


class _Finder(ast.NodeVisitor):
    """Collects the changes of one module.

    Left alone: annotations, decorators, asserts, words, and what only types need.
    """

    def __init__(self, module: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._module, self._source = module, source
        self._starts = [
            0,
            *itertools.accumulate(len(line) for line in source.splitlines(keepends=True)),
        ]
        self._returns: list[str] = []
        self.visit(ast.parse(source))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[
            node.end_lineno - 1
        ] + node.end_col_offset

    def _add(self, node: ast.expr | ast.stmt, text: str) -> None:
        start, end = self._span(node)
        before = " ".join(self._source[start:end].decode().split())
        self.found.append(
            Mutant(self._module, node.lineno, f"{before}  ->  {text}", start, end, text)
        )

    def _change(self, node: ast.expr, changed: ast.expr) -> None:
        self._add(node, f"({ast.unparse(changed)})")

    # ------------------------------------------------------------------ what is left alone

    def visit_If(self, node: ast.If) -> None:
        """`if TYPE_CHECKING:` is not run at all."""
        if ast.unparse(node.test) in {"TYPE_CHECKING", "__name__ == '__main__'"}:
            return
        self._test(node.test)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """The body, and the default values."""
        self._returns.append("" if node.returns is None else ast.unparse(node.returns))
        for thing in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if thing is not None:
                self.visit(thing)
        self._returns.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """The body."""
        for thing in node.body:
            self.visit(thing)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value."""
        if isinstance(node.target, ast.Attribute):
            self._add(node, "pass")
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """States what holds anyway."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words."""

    # ------------------------------------------------------------------ statements

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call is left out. Docstrings are no calls."""
        if isinstance(node.value, ast.Call):
            self._add(node, "pass")
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Left out where a variable that is not set would show at once otherwise."""
        if any(
            isinstance(part, ast.Attribute | ast.Subscript)
            for target in node.targets
            for part in ast.walk(target)
        ):
            self._add(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Left out."""
        self._add(node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        """Left out."""
        self._add(node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        """Left out."""
        self._add(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        """Nothing is returned, or the opposite."""
        returns = self._returns[-1]
        if node.value is None:
            return
        is_plain = isinstance(node.value, ast.Constant) or ast.unparse(node.value) in {"[]", "()"}
        if not is_plain and (returns.endswith("Commands") or returns.startswith("list[")):
            self._add(node.value, "[]")
        elif not is_plain and returns.startswith("tuple[") and returns.endswith(", ...]"):
            self._add(node.value, "()")
        elif not is_plain and returns.endswith("| None"):
            self._add(node.value, "None")
        elif returns == "bool" and not isinstance(node.value, ast.Constant):
            self._add(node.value, f"(not ({ast.unparse(node.value)}))")
        self.visit(node.value)

    # ------------------------------------------------------------------ expressions

    def _test(self, node: ast.expr) -> None:
        for value in ("True", "False"):
            self._add(node, value)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Always the one, always the other."""
        self._test(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Nothing is filtered."""
        for test in node.ifs:
            self._add(test, "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """The bound, or the opposite."""
        for index, operator in enumerate(node.ops):
            if type(operator) in _COMPARISONS:
                operators = [
                    *node.ops[:index],
                    _COMPARISONS[type(operator)](),
                    *node.ops[index + 1 :],
                ]
                self._change(node, ast.Compare(node.left, operators, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` for `or`, and without one of the parts."""
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._change(node, ast.BoolOp(other, node.values))
        for index in range(len(node.values)):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            self._change(node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without `not`, without `-`."""
        if isinstance(node.op, ast.Not | ast.USub):
            self._change(node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another operator, except between words."""
        has_words = any(
            isinstance(part, ast.JoinedStr)
            or (isinstance(part, ast.Constant) and isinstance(part.value, str))
            for part in ast.walk(node)
        )
        if type(node.op) in _OPERATORS and not has_words:
            self._change(node, ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """The other truth, or one more."""
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, repr(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        """The opposite function."""
        if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            self._add(node.func, _FUNCTIONS[node.func.id])
        self.generic_visit(node)
