"""The cycle: collect what people did, train, gate, deploy to a share of users, watch, promote or
roll back.

    parts.py       what the cycle asks of the store, the trainer, the fleet and the suites
    sequential.py  confidence sequences: a test that may be looked at as often as one likes
    gate.py        a candidate against the deployed version and an anchor, before anybody sees it
    monitors.py    alarms on rates, and on a reward that rises while retention does not
    tables.py      the cycle's tables in the database
    ledger.py      the reads and writes of these tables, each edge one transaction
    cycle.py       the states and their edges
    watching.py    what an A/B test says so far: go on, promote, or roll back
    rehearsal.py   the four parts without a model: numbers for weights, random people
    served.py      the four parts for real, in one process
    training.py    from answers and rewards to what the learner is given
    learned.py     a reward model that each cycle trains, and by which the next ones pay
    versions.py    the versions of the weights in a workdir
    held_out.py    the suites of a config, with a judge
    api.py         parts by name, as a config names them
    recorded.py    recorded sessions as the test and the monitors read them
    cases.py       recorded sessions as rows of a suite, and as cases of the red team
    dashboard.py   the page
"""
