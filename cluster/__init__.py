"""Runs on clusters: scripts and manifests for their engines, and the roles of a run on Ray.

In go a config's command line and how many hosts and devices it gets (``render.Job``). Out come
batch scripts for SLURM or manifests for Kubernetes (``render.py``, from ``slurm/`` and
``kubernetes/``), or roles that Ray places, watches and starts again (``ray_run.py``). The stages on
which faults are made are in ``fault_stages.py``. Start with ``render.py`` or ``ray_run.py``.
"""
