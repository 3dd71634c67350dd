"""Lists the small mistakes that could be made in a Python file: an operator, a bound, a term, a condition, a statement.

An edit replaces the text of one node, so all else of the file stays as it is written. Left out is what no test should
notice: texts, messages and logging, type hints, decorators, assertions, tolerances, and constants marked `Final`, which
are chosen or measured. Some of the remaining mutants still change nothing; only a reader can tell.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

OTHER_OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Div),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
OTHER_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "int", "floor": "ceil"}
ORDER_IS_FREE = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "zip", *OTHER_FUNCTIONS}
TALKING = {"logger", "log", "warnings", "print"}
TOLERANCE = 1e-5  # floats below it only keep rounding or ties apart


@dataclass(frozen=True, slots=True)
class Edit:
    """Other text for a node of a file."""

    node: ast.expr | ast.stmt
    text: str

    def apply(self, source: str) -> str:
        """Return the whole file with the other text. (Columns of `ast` count bytes.)"""
        data, starts = source.encode(), [0]
        for line in source.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        assert self.node.end_lineno is not None, "the parser sets it"
        assert self.node.end_col_offset is not None, "the parser sets it"
        begin = starts[self.node.lineno - 1] + self.node.col_offset
        end = starts[self.node.end_lineno - 1] + self.node.end_col_offset
        return (data[:begin] + self.text.encode() + data[end:]).decode()


def places(source: str) -> list[list[Edit]]:
    """Return, for each place where a mistake could be made, the edits that make one."""
    return [edits for node in _mutable(ast.parse(source)) if (edits := list(_edits(node)))]


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one whose meaning tests should hold."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if isinstance(node, ast.ClassDef) and name in ("bases", "keywords"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield child
                if not isinstance(child, ast.Raise):  # its message; the statement itself may be missing
                    yield from _mutable(child)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.AnnAssign):
        return "Final" in ast.unparse(node.annotation) and isinstance(node.target, ast.Name)
    if isinstance(node, ast.Expr):
        talks = isinstance(node.value, ast.Call) and ast.unparse(node.value.func).split(".")[0] in TALKING
        return talks or isinstance(node.value, ast.Constant)
    if isinstance(node, ast.keyword):
        return node.arg in ("strict", "name")
    return isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)


def _edits(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.stmt):
        if _can_be_missing(node):
            yield Edit(node, "pass")
        if isinstance(node, ast.AugAssign):
            for operator in OTHER_OPERATORS.get(type(node.op), ()):
                yield Edit(node, ast.unparse(ast.AugAssign(node.target, operator(), node.value)))
    elif isinstance(node, ast.Constant):
        yield from (Edit(node, repr(value)) for value in _other_values(node.value))
    elif isinstance(node, ast.expr):
        for other in _other_expressions(node):
            yield Edit(node, f"({ast.unparse(other)})")
    for test in _conditions(node):
        if not isinstance(test, ast.Compare | ast.Constant):  # those are nodes of their own
            yield Edit(test, f"(not ({ast.unparse(test)}))")


def _can_be_missing(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if isinstance(node, ast.Return):
        return node.value is None
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign | ast.Continue | ast.Break | ast.Raise | ast.Delete)


def _other_values(value: object) -> tuple[object, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, value - 1)
    if isinstance(value, float) and (value == 0 or abs(value) >= TOLERANCE):
        return (value * 2, value / 2) if value else (1.0,)
    return ()


def _other_expressions(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and not _is_text(node) and not _is_type(node):
        for operator in OTHER_OPERATORS.get(type(node.op), ()):
            yield ast.BinOp(node.left, operator(), node.right)  # type: ignore[arg-type]
        yield node.left
        if isinstance(node.op, ast.Add | ast.Mult):
            yield node.right
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for operator in OTHER_OPERATORS[type(node.ops[0])]:
            yield ast.Compare(node.left, [operator()], node.comparators)  # type: ignore[list-item]
    elif isinstance(node, ast.BoolOp):
        for operator in OTHER_OPERATORS[type(node.op)]:
            yield ast.BoolOp(operator(), node.values)  # type: ignore[arg-type]
        for number in range(len(node.values)):
            yield ast.BoolOp(node.op, node.values[:number] + node.values[number + 1 :])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)


def _other_calls(node: ast.Call) -> Iterator[ast.expr]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in OTHER_FUNCTIONS:
        yield ast.Call(ast.Name(OTHER_FUNCTIONS[name]), node.args, node.keywords)
    first = node.args[:2]
    if len(first) == 2 and name in ("min", "max") and not any(isinstance(arg, ast.Starred) for arg in node.args):
        yield from first  # a bound that was forgotten
    if len(first) == 2 and name not in ORDER_IS_FREE and ast.dump(first[0]) != ast.dump(first[1]):
        yield ast.Call(node.func, [first[1], first[0], *node.args[2:]], node.keywords)


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_type(node: ast.BinOp) -> bool:
    """Return whether it is `A | None`, written outside of an annotation."""
    right = node.right
    is_none = isinstance(right, ast.Constant) and right.value is None
    is_class = isinstance(right, ast.Name) and right.id[0].isupper() and not right.id.isupper()
    return isinstance(node.op, ast.BitOr) and (is_none or is_class)
