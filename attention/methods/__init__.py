"""Methods of attention, one file each: settings of a layer go in; a forward pass, a decoding step
and their costs come out.

Start with ``method.py`` and ``dense.py``; a new method is a class and an entry in ``api.METHODS``.
"""
