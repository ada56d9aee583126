"""Ways to cheat and to escape, as data, and what each of them comes to.

ground.py     the task that they are tried on
cheats.py     ways to be paid for nothing, as the text of a solution
files.py      ways to be paid for nothing, as other files of the work
escapes.py    ways out of the sandbox, as commands
episodes.py   whole episodes of a policy that follows a script
trial.py      tries them, against each grader and in whole episodes
honest.py     references of tasks, which must pass
foreign.py    tries cheats on anybody's tasks, against their own graders and this project's
foreign_cheats.py    what needs to know nothing about a task
environments.py      tries cheats on the rewards of others' environments
"""
