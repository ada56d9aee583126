"""Versions of the weights: the learner publishes, actors subscribe.

Start with ``versions.py``. ``local.py`` is for one process; ``stored_*`` go through shared
storage, ``transfer_*`` from device to device.
"""
