"""A run: a config and a workdir go in, the objects that it is made of come out.

Start with ``config.py`` (the config and its sections), ``agreement.py`` (what of it contradicts
itself) and ``run.py``, which builds tasks, model, tokenizer and schedulers from it. ``derive.py``
fills in values that follow from others, ``dry_run.py`` tells what a run will need, ``lineage.py``
and ``provenance.py`` where it comes from.
"""
