"""`weft doctor`: facts about this machine, and in words what would go wrong on it.

report.py    the command: facts and problems as text or JSON
look.py      gathers the facts
gpus.py      those about GPUs; on request what two ranks on one measure
ask.py       runs a program that is asked for a fact
problems.py  the facts, each with its reason, and the problems that follow from them; pure
hosts.py     the command with --hosts: what hosts have, side by side
"""
