"""The RL system. Its packages, from the top of the imports down:

    train.py  act.py  prefill.py  sft.py  schedule.py    what a process runs; begin with train.py
    report  recording            what is done with a run that has trained for some steps
    foreign                      runs of other trainers, read from their dumps
    run                          a run: its config, workdir, model, provenance
    evaluation  redteam          suites and comparisons; ways to cheat
    rewards  tasks               signals; where tasks come from
    rollout  learner             sampling; advantages, losses, batches, updates
    harness  environment         agents of others; episodes, tools, sandboxes, graders
    weights  store  checkpoint   versions; the record of groups; states of training
    metrics  config  host  text  numbers of a run; reading configs; files and signals; lines
    types.py                     the vocabulary

``ROOMS`` in ``tests/test_imports.py`` is this order, and a test holds it.
"""
