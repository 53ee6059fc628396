"""A driver, which is rank 0, and workers that stay and form a group. In reading order:

team.py         LocalTeam, and one call of it
member.py       a worker's part in a team: what it has registered, and the functions it runs

It imports every other package of the local engine.
"""
