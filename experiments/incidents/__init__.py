"""Two ways in which a policy escaped a reward from people, reproduced and then closed: broken tool
calls that are left out of training (``configs/broken_calls.py``), and questions in place of edits
(``configs/questions.py``).
"""
