"""Learning from people, on top of the RL system.

    serving     a server for a run's weights, which records every answer
    feedback    what people did with the answers, and rewards of it
    realtime    the cycle: collect, train, gate, deploy to a share of users, watch, promote
    simulated   programmers who are simulated, fitted on what real ones did
    editor      a language server that offers suggestions and reports what became of them

Start with ``realtime/cycle.py``.
"""
