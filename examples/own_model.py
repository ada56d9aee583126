"""Native sparse attention (NSA, arXiv 2502.11089) in a model of your own, trained to repeat itself.

    python -m examples.own_model

A row is 32 random tokens twice; only attention to a token's first occurrence can tell what follows
the second one. Any other method of ``attention.methods`` may stand in NSA's place.
"""

import jax
import jax.numpy as jnp
import optax

from attention.layout import lay_out
from attention.methods.method import LayerShape
from attention.methods.nsa import NSA
from pallas_kernels.tokens import sequences

V, D, N, H, LENGTH, ROWS = 16, 32, 2, 16, 64, 32
METHOD = NSA(block=16, length=8, stride=4, picks=3, window=8)


def init(key):
    shapes = {"embed": (V, D), "before": (V, D), "places": (LENGTH, D)}
    shapes |= {"qkv": (D, 3 * N * H), "out": (N * H, V)}
    extra = METHOD.parameters(LayerShape(D, N, N, H))
    shapes |= {name: parameter.shape for name, parameter in extra.items()}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {name: 0.2 * jax.random.normal(keys[name], shape) for name, shape in shapes.items()}


def loss(params, tokens):
    x = params["embed"][tokens] + params["places"]
    x = x.at[:, 1:].add(params["before"][tokens[:, :-1]])  # each token knows the one in front
    q, k, v = jnp.split((x @ params["qkv"]).reshape(ROWS, LENGTH, 3 * N, H), 3, axis=2)
    # who sees whom: each row is one sequence that begins at slot 0
    layout = lay_out((METHOD,), sequences(jnp.full(ROWS, LENGTH), LENGTH), align=0)
    keys = {"main": (k, v)} | METHOD.new_keys(params, x, lambda k: k)
    keys |= METHOD.derived_keys(params, keys, layout)
    out = METHOD.attend(q, keys, layout, METHOD.head_inputs(params, x))
    logits = out.reshape(ROWS, LENGTH, N * H) @ params["out"]
    ahead, follows = logits[:, LENGTH // 2 : -1], tokens[:, LENGTH // 2 + 1 :]
    return optax.softmax_cross_entropy_with_integer_labels(ahead, follows).mean()


def main(steps: int = 150) -> list[float]:
    params, optimizer = init(jax.random.key(0)), optax.adam(5e-3)
    state, losses = optimizer.init(params), []

    @jax.jit
    def step(params, state, key):
        tokens = jnp.tile(jax.random.randint(key, (ROWS, LENGTH // 2), 0, V), (1, 2))
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    for i in range(steps):
        params, state, value = step(params, state, jax.random.key(i))
        losses.append(float(value))
        if i % 25 == 0 or i == steps - 1:
            print(f"step {i}: loss {value:.3f}")
    return losses


if __name__ == "__main__":
    main()
