"""A cheater, trained on purpose: reinforcement learning against a grader that can be fooled, the
same against this project's grader, and what one line in the prompt of training changes.

The config is ``configs/cheater.py``. It names what stands here as ``package.module:object``; no run
of any other config uses it.
"""
