"""The cycle of real-time RL: of three versions the second is bad with people.

What: collect, train, gate, deploy to 30 % of users, watch, promote or roll back. The parts are a
  rehearsal: numbers for weights, random people, and the real database, gate, test and monitors.
Command: python -m launch.realtime --config=configs/rehearsal.py --workdir=runs/rehearsal --cycles=3
Hardware: 2 CPU cores. Run time: seconds.
Expected metric: the first and the third candidate promoted, the second rolled back.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (fewer people)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/rehearsal.py:{arg}: the argument must be empty or smoke")
    config = dict(
        parts=dict(name="rehearsal", users=600, sessions=200, bad=(2,)),
        cycle=dict(
            # A real one: cadence_s=18_000, poll_s=10, least_sessions in the thousands.
            cadence_s=0.0,
            poll_s=0.01,
            least_sessions=400,
            window=1,
            gate=dict(
                margin=0.02,
                anchor_margin=0.02,
                rates=(
                    dict(rate="invalid_calls", most=0.1, rise=0.02),
                    dict(rate="edits", fall=0.05),
                    dict(rate="questions", rise=0.05),
                ),
            ),
            watch=dict(
                share=0.3,
                metric="retained",
                scale=0.05,
                margin=0.02,
                guardrails=(
                    dict(metric="invalid_calls", harm="up", scale=0.05),
                    dict(metric="edits", harm="down", scale=0.05),
                    dict(metric="latency", harm="up", scale=0.1),
                ),
                most_s=86_400.0,
            ),
            monitors=dict(
                rates=(
                    dict(metric="edits", side="down"),
                    dict(metric="questions", side="up"),
                    dict(metric="invalid_calls", side="up"),
                    dict(metric="length", chart="ewma"),
                    dict(metric="latency", chart="ewma", side="up"),
                ),
            ),
        ),
    )
    if arg == "smoke":
        config["parts"].update(users=300)
        config["cycle"].update(least_sessions=200)
        config["cycle"]["watch"].update(scale=0.1, margin=0.05)
    return ml_collections.ConfigDict(config)
