"""Squid: dense attention over documents, each of which is encoded alone.

A token inside a document sees the earlier tokens of that document. A token outside sees every
earlier token, inside documents or not, in one softmax. In training the numbers of documents in
``Tokens.documents`` say so, within a packed row. In decoding no mask keeps documents apart: each
was prefilled in a row of its own, and a row that decodes lies outside of all and reads all of its
pages. Layers of other methods follow the same rule of who sees whom.
"""

from __future__ import annotations

import dataclasses

from attention.methods.dense import Dense


@dataclasses.dataclass(frozen=True)
class Squid(Dense):
    """Dense attention that insists on documents. It computes what ``Dense`` does: the mask of each
    document alone comes of the section ``documents``, and every other method has it there too.
    """

    needs_documents = (
        "squid is dense attention over documents, each encoded alone: add the section documents, "
        "such as documents={}, or use 'dense'. With a softmax of their own and gates, as squid was "
        "in earlier configs, it is 'gated_documents'"
    )
