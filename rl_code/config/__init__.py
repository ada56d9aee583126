"""Reading configs: an ml_collections dict goes in, frozen dataclasses come out.

Start with ``read_config.py``. ``named.py`` finds what a config names, also
``package.module:object``.
"""
