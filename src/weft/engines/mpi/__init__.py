"""Groups over hosts: shared memory inside each host, MPI between them.

engine.py        what the registry names
placement.py     which ranks are on which host; what is cut into chunks, and who sends it: pure
speaker.py       the process that takes a rank's place in MPI, from start to end
memory.py        the memory that the ranks of a host share with their agent, and the bell
meeting.py       a step of the ranks of a host and their agent, as a rank makes it
collectives.py   how a rank carries out a collective
packing.py       how what agents say is packed
mail.py          messages between agents
agent.py         the loop of a host's agent
service.py       what the agent does for one group: its steps, its losses, its next generation
exchange.py      the agent's part in a collective
lanes.py         the memory through which a rank asks its agent for rows of other hosts
layout.py        a table's memory on each host, and what is known of its ranks
standby.py       what the other speakers of a host keep of tables, to take their agent's place
tables.py        the agent's part in tables: the rows of its host, and requests of other hosts
store.py         a table as a rank sees it
copies.py        a host's copy of rows that other hosts keep
making.py        how a table is made, by ranks and agents
group.py         MpiGroup
launcher.py      `weft run --hosts`
survey.py        what hosts have: Python, packages, names
programs.py      the mpirun of this environment
"""
