"""Longer loops: people who look at suggestions only every few hours.

What: the cycle of configs/realtime.py with people who report nothing in the first seconds. Hours
  later they tell what they kept, and how much of it is alive after an hour. So there are fewer
  events, each of which says more, and the reward is retention alone. The number of answers of a
  cycle is that of configs/realtime.py, beside which it is to be compared.
Command: python -m launch.realtime --config=configs/seldom.py --workdir=runs/seldom --cycles=3
Hardware: 2 CPU cores. Run time: as configs/realtime.py.
Expected metric: rewards between 0 and 1, with silence for whatever was not kept; not compared yet.
"""

import ml_collections

from configs import realtime


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (a minute or two)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/seldom.py:{arg}: the argument must be empty or smoke")
    config = realtime.get_config(arg)
    with config.ignore_type():
        # silence is what people say of what they did not keep, so it is paid as such
        config.parts.feedback.reward = dict(signals=("retention",))
        # A real one: silence_s=14_400. Simulated people know at once what they will find then.
        config.parts.people.seldom = True
    return config
