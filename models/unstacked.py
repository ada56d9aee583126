"""A model whose layers lie apart, as a sampler reads them.

A slice of a stack is a copy wherever a compiler cannot read it in place: on CPU, and before every
product of cuBLASLt. In a loop that decodes, each step would copy all layers. So the layers are cut
out of their stacks once for a version of the weights, and matrices that read the same input are
laid side by side (``models.side_by_side``).
"""

from __future__ import annotations

import functools
import itertools

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from attention.layout import Before, lay_out
from attention.methods.method import Parameters
from models.layers import Layers, place_name
from models.sharding import constrain_parameters, context_size, parameter_shardings, use_mesh
from models.side_by_side import lay_side_by_side
from models.transformer import Transformer
from pallas_kernels.tokens import Tokens


class Unstacked(Transformer):
    """A transformer with a module for each layer, of parameters that have lost the axis of layers.

    It samples, computes hidden states layer by layer, and cannot be trained. Parameters that are
    not of layers are the model's own.
    """

    def __init__(self, model: Transformer, joins: bool):
        """
        model: abstract, or on devices. joins: whether matrices that read the same input are joined.
        """
        self.config = model.config
        self.embed = model.embed
        self.final_norm = model.final_norm
        if not model.config.tied_embeddings:
            self.unembed = model.unembed
        whole = jax.tree.map(lambda x: x, model)
        del whole.embed, whole.final_norm
        if not model.config.tied_embeddings:
            del whole.unembed
        for name, module in _apart(whole, joins).items():
            setattr(self, name, module)

    def unstacked(self) -> list[tuple[Layers, Parameters]]:
        """As ``Transformer.unstacked``; nothing is copied."""
        numbers = range(self.config.num_layers)
        return [(getattr(self, _layer(at)), self._own_parameters(at)) for at in numbers]

    def parts(self) -> list[Layers]:
        """As ``Transformer.parts``: each layer."""
        return [getattr(self, _layer(at)) for at in range(self.config.num_layers)]

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        where: Tokens,
        runs: int = 0,
        before: Before | None = None,
        align: int = 1,
        documents: bool = False,
    ) -> Float[Array, "B T D"]:
        """As ``Transformer.hidden``, for rows that follow nothing.

        Raises ValueError for ``before``.
        """
        if before is not None:
            raise ValueError("layers that lie apart compute no rows that follow other tokens")
        methods = self.config.attention
        parts = context_size()
        layout = lay_out(methods, where, runs, align=align, documents=documents, parts=parts)
        x = self._between(self.embed_tokens(tokens))
        none = [None] * len(methods)
        for period in itertools.batched(self.unstacked(), len(methods)):
            layers, of_methods = (list(each) for each in zip(*period, strict=True))
            held = (layers, None, of_methods, none, none)
            x, _ = self._period(positions, layout, where.segments > 0, None, False, x, held)
        return self.finish(x)

    def _own_parameters(self, at: int) -> Parameters:
        own = getattr(self, _method(at), None)
        return {} if own is None else own.layer(...)


def unstacked(model: Transformer, mesh: Mesh | AbstractMesh) -> Unstacked:
    """The model with its layers apart, for the devices of a mesh. It takes as much memory as the
    layers, beside the stacks for as long as somebody keeps those.

    model: abstract, or on these devices; one that is unstacked comes back as it is. Matrices that
      read the same input are joined where no device has a part of them alone.
    """
    if isinstance(model, Unstacked):
        return model
    # cut over ``tensor``, a joined matrix would have to be sorted by device
    joins = mesh.shape["tensor"] == 1
    with use_mesh(mesh):
        if not _is_abstract(model):
            return Unstacked(model, joins)
        found = jax.eval_shape(functools.partial(Unstacked, joins=joins), model)
    shardings = parameter_shardings(found, mesh, whole=True)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        found,
        shardings,
    )


@functools.partial(jax.jit, static_argnums=1)
def _apart(model: Transformer, joins: bool) -> dict[str, object]:
    """By name, the module of each layer, and that of its method's parameters if it has any."""
    found = {}
    period = len(model.config.attention)
    for at, (layer, _) in enumerate(Transformer.unstacked(model)):
        if joins:
            layer = lay_side_by_side(layer)
        found[_layer(at)] = layer
        own = getattr(model, place_name(at % period), None)
        if own is not None:
            found[_method(at)] = jax.tree.map(lambda x, n=at // period: x[n], own)
    return constrain_parameters(found)


def _is_abstract(model: Transformer) -> bool:
    return isinstance(jax.tree.leaves(model)[0], jax.ShapeDtypeStruct)


def _layer(at: int) -> str:
    return f"layer_{at}"


def _method(at: int) -> str:
    return f"method_{at}"
