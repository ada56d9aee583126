"""A run: a config and a workdir go in, the objects that it is made of come out.

Start with ``keys.py`` (all that a config may say), ``config.py`` (what of it runs),
``agreement.py`` (what of it contradicts itself) and ``run.py``, which builds model, tokenizer and
schedulers from it; ``task_sets.py`` loads the tasks, ``wording.py`` makes prompts of them.
``derive.py`` fills in values that follow from others, ``dry_run.py`` tells what a run will need,
``lineage.py`` and ``provenance.py`` where it comes from.
"""
