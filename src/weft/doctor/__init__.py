"""`weft doctor`: the machine as weft sees it, and in words what would go wrong on it.

problems.py  what is known, facts with their reasons, and what follows from them; pure
look.py      how the facts are gathered
report.py    facts and problems as text or JSON
"""
