"""The methods of attention by the names that configs use.

A new method is one file beside this one and an entry here, or a class of a package of one's own
that a config names as ``package.module:Class``. ``method.Method`` says what a method is.
"""

from __future__ import annotations

from attention.methods.dense import Dense
from attention.methods.dsa import DSA
from attention.methods.gated_delta import GatedDelta
from attention.methods.gated_documents import GatedDocuments
from attention.methods.method import Method
from attention.methods.mla import MLA
from attention.methods.moba import MoBA
from attention.methods.nsa import NSA
from attention.methods.sinks import Sinks
from attention.methods.squid import Squid
from attention.methods.window import Window

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "window": Window,
    "moba": MoBA,
    "nsa": NSA,
    "squid": Squid,
    "gated_documents": GatedDocuments,
    "gated_delta": GatedDelta,
    "mla": MLA,
    "sinks": Sinks,
    "dsa": DSA,
}

# The methods of a model whose config names none.
DEFAULT: tuple[Method, ...] = (Dense(),)
