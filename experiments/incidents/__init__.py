"""Two ways in which a reward from people was gamed, reproduced and then prevented: broken tool calls
that were left out of training (``configs/broken_calls.py``), and questions in place of edits
(``configs/questions.py``).
"""
