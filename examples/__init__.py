"""Short scripts, each of which uses one part of the project without the rest:

own_model  a method of attention in a model of your own
grading    the sandbox and the grader
sampling   the inference engine
learning   the learner, on trajectories of your own
recording  what can be done with a finished run

and a notebook, read_a_run.ipynb, which reads the record of a finished run.
"""
