"""`weft doctor`: facts about this machine, and in words what would go wrong on it.

report.py    the command: facts and problems as text or JSON
look.py      gathers the facts
problems.py  the facts, each with its reason, and the problems that follow from them; pure
hosts.py     the command with --hosts: what hosts have, side by side
"""
