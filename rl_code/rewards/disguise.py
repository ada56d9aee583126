"""Other texts of the same code, so that tests can tell versions of it apart only by what they do.

Tests may read the code that they should run: its text, its length, the names that it defines, its
code objects. What ``disguised`` writes does the same, but differs in all of these, at random.
"""

from __future__ import annotations

import ast
import random

_WORDS = ("unread", "spare", "extra", "value", "former")
# Expressions of a statement of which parts are written in another way.
_EXPRESSIONS = ("value", "test", "iter", "exc")


def disguised(text: str, drawn: random.Random, share: float) -> str:
    """A module's text in another form: what is read in functions stands in lists of one element,
    constants that nobody reads stand in the module and in its functions, and a comment of any
    length below all. Raises SyntaxError and ValueError for what is no Python.

    share: of what can be written in another way, 0 to 1. With 1 no operator and no call has a name
    or a constant beside it.
    """
    tree = _Disguise(drawn, share).visit(ast.parse(text))
    tree.body += [_unread(drawn) for _ in range(drawn.randrange(3))]
    text = ast.unparse(ast.fix_missing_locations(tree))
    return f"{text}\n# {drawn.choice(_WORDS) * drawn.randrange(1, 20)}\n"


def _unread(drawn: random.Random) -> ast.stmt:
    """A constant that nobody reads."""
    name = "_".join(drawn.choices(_WORDS, k=3))
    value = ast.Constant(drawn.randrange(10**6))
    return ast.Assign([ast.Name(f"_{name}_{drawn.randrange(10**6)}", ast.Store())], value)


class _Disguise(ast.NodeTransformer):
    """Writes the statements of functions in another way."""

    def __init__(self, drawn: random.Random, share: float):
        self._drawn = drawn
        self._share = share
        self._expressions = _InLists(drawn, share)
        self._in_function = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        before, self._in_function = self._in_function, True
        # decorators and defaults stay as they are
        node.body = self._body(node.body)
        self._in_function = before
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.stmt:
        before, self._in_function = self._in_function, True
        node.body = self._body(node.body)
        self._in_function = before
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        before, self._in_function = self._in_function, False
        self.generic_visit(node)
        self._in_function = before
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not self._in_function or not isinstance(node, ast.stmt | ast.excepthandler):
            # what is nested in a module or a class may hold functions
            return super().generic_visit(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return node  # a docstring
        for field in ("body", "orelse", "finalbody", "handlers"):
            for inner in getattr(node, field, ()):
                self.visit(inner)
        for field in _EXPRESSIONS:
            expression = getattr(node, field, None)
            if isinstance(expression, ast.expr):
                setattr(node, field, self._expressions.visit(expression))
        return node

    def _body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """A function's statements, with constants that nobody reads among them."""
        documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        # what must be first: its docstring, and names that are not its own
        first = sum(isinstance(one, ast.Global | ast.Nonlocal) for one in body) + documented
        found = []
        for at, statement in enumerate(body):
            if at >= first and self._drawn.random() < self._share:
                found.append(_unread(self._drawn))
            found.append(self.visit(statement))
        return found


class _InLists(ast.NodeTransformer):
    """Puts what an expression reads into lists of one element, of which it takes the first."""

    def __init__(self, drawn: random.Random, share: float):
        self._drawn = drawn
        self._share = share

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._other(node) if isinstance(node.ctx, ast.Load) else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return self._other(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        # ``super()`` is known by its name
        name = node.func if isinstance(node.func, ast.Name) else None
        self.generic_visit(node)
        node.func = name or node.func
        return self._other(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        return node  # it takes texts alone

    def _other(self, value: ast.expr) -> ast.expr:
        if self._drawn.random() >= self._share:
            return value
        return ast.Subscript(ast.List([value], ast.Load()), ast.Constant(0), ast.Load())
