"""Runs of other trainers: their dumps are read into a store of ours.

    dump.py       what a format makes of its files: steps, groups, episodes, spans of tokens
    reading.py    JSON lines and Parquet of strangers, within bounds
    formats.py    the formats by name
    messages.py   chat messages as spans of text
    trl.py        tables of completions that TRL's trainers write
    verl.py       JSON lines that verl writes for each step
    traces.py     message graphs of the package verifiers, with tokens and branches
    verifiers.py  evaluations of verifiers
    prime_rl.py   training runs of prime-rl: traces, and what is noted of them later
    tokens.py     spans as trajectories: with ids of the dump, or with those of its text
    importing.py  writes a workdir that reports and comparisons can read
    mismatch.py   log-probabilities of sampler and trainer, token by token
    recompute.py  the same with weights that are named, in our own forward pass

Nothing of a dump is executed or unpickled. To add a format, write one file like ``verl.py``.
"""
