"""How ranks find each other, wait for each other, and learn who died. In reading order:

waiting.py      the memory model; counters; sleeping on a futex, with liveness and a deadline
locks.py        shared and exclusive locks that survive their holder
roster.py       who is in the launch, who lives, and what each rank is doing
meeting.py      one step of a group: barrier, mailboxes, survivors; blocks that all ranks map
devices.py      memory of each rank's device that all ranks map
rendezvous.py   how the ranks of a launch find each other
launcher.py     `weft run`

It imports `processes` and `memory`.
"""
