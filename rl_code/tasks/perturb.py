"""Rewrites a module so that whatever its author left to chance comes out differently.

A correct solution may make the other choice. So an answer that changes under ``perturb`` must not
be used to judge a solution.
"""

from __future__ import annotations

import ast
import warnings


class _Sets(ast.NodeTransformer):
    """Writes set displays and comprehensions as calls of ``set``, and lets loops walk copies of
    lists.
    """

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = ast.Call(ast.Name("_copied", ast.Load()), [node.iter], [])
        return node

    def visit_Set(self, node: ast.Set) -> ast.AST:
        self.generic_visit(node)
        return _call_set(ast.List(node.elts, ast.Load()))

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return _call_set(ast.ListComp(node.elt, node.generators))


def _call_set(argument: ast.expr) -> ast.Call:
    return ast.Call(ast.Name("set", ast.Load()), [argument], [])


_PERTURBED = """\
import builtins as _builtins, random as _random
_random.seed("again")
def _reordered(base):
    class Reordered(base):
        def __iter__(self):
            return _builtins.reversed(_builtins.list(base.__iter__(self)))
    def wrapped(name):
        method = getattr(base, name)
        def operation(self, *others):
            value = method(self, *others)
            return Reordered(value) if isinstance(value, base) and value is not self else value
        return operation
    for name in ("__and__", "__or__", "__sub__", "__xor__", "__rand__", "__ror__", "__rsub__",
                 "__rxor__", "union", "intersection", "difference", "symmetric_difference", "copy"):
        setattr(Reordered, name, wrapped(name))
    if base is _builtins.set:
        Reordered.pop = lambda self: (lambda x: (base.remove(self, x), x)[1])(next(iter(self)))
    return Reordered
def _copied(walked):
    return walked[:] if type(walked) is list else walked
def _last_first(function):
    def chosen(*values, **options):
        if "key" in options and _builtins.len(values) == 1:
            values = (_builtins.list(values[0])[::-1],)
        return function(*values, **options)
    return chosen
min, max = _last_first(_builtins.min), _last_first(_builtins.max)
set, frozenset = _reordered(_builtins.set), _reordered(_builtins.frozenset)
"""


def perturb(source: str) -> str:
    """The module with sets walked backwards, the last of equals as ``max`` and ``min`` by a key,
    lists that a loop changes walked as they were before it, and another seed.

    Raises SyntaxError when the source does not parse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = _Sets().visit(ast.parse(source))
    future = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    tree.body = [n for n in tree.body if n not in future]
    header = "".join(f"{ast.unparse(n)}\n" for n in future)
    return f"{header}{_PERTURBED}{ast.unparse(ast.fix_missing_locations(tree))}\n"
