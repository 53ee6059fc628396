"""Processes of this machine over shared memory: the engine by default.

    engine.py       what the registry asks for: join, make_pool, make_team, share, launch
        |
      team/         a driver and workers that form a group: functions, replicas, train_step
       |    \
       |     group.py       LocalGroup: ranks that meet
       |        |    \
       |   collectives/  tables/
       |        |    /
       |     meeting/       waiting, locks, who lives; rendezvous; `weft run`
       |        |
      pool/     |           a driver and workers for independent calls: map, distribute
        \\       |
         memory/            segments, blocks, shared arrays
            |
        processes/          system calls, sockets, output

Each package imports only what is drawn below it; its `__init__.py` lists its modules in reading
order.

group.py        the group of ranks
engine.py       the functions that the registry's row names
probes.py       what `weft doctor` tries of this machine
"""
