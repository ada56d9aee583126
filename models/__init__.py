"""Models as pytrees: a ModelConfig goes in, a ``flax.nnx`` Transformer comes out; folders of
others are read and written.

Start with ``transformer.py`` and ``model_config.py``. ``families/`` has a file per model family,
``sharding.py`` the mesh and the table of axes, ``tokenizer.py`` the tokenizer.
"""
