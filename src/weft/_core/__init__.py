"""What a call passes through. It knows no processes, and is pure wherever it can be. In reading
order:

timeouts.py     how long a call may wait
launched.py     this process's place, as its launcher says
counts.py       whole numbers as users give them
messages.py     what processes say to each other, as JSON
seeding.py      random seeds that do not depend on how many workers there are

Of collectives:

elements.py     what the numbers of an array are, and in what they are summed
shared.py       what `share` returns
values.py       the arrays of a call, and where its results go
together.py     many small arrays as few
split.py        which rank gets which rows, and which bytes
plans.py        what a collective comes to
calls.py        a collective before and after the ranks have met; reduce and all_reduce
moves.py        broadcast, scatter, gather and all_gather

Of tables:

copying.py      one array copied to another
adding.py       one array added to another
joint_work.py   what several processes do together: sums and broadcasts
rules.py        what built-in updaters do to rows and their state
updaters.py     updaters by name, with options, or a user's function
consistency.py  who waits for whom: async, bsp, ssp(k)
tables.py       what a table is, and what may be given to it
rows.py         some rows of a table, read and updated
checkpoint.py   a table on disk

Of map:

calling.py      how a function is called with an item
part.py         some columns of an array, as an item
read_only.py    arrays to which nothing can be written
columns.py      an array cut into parts, and the results pasted together
jobs.py         what is asked of a team, and what it answers
schedule.py     which items are run next, and how many at once
work.py         what a driver and its workers say to each other
worker.py       what a worker does with a chunk
failures.py     exceptions on their way from one process to another; the user's line
unpicklable.py  where in a value the part lies that cannot be pickled
collect.py      results in the order of their items

Of functions:

portions.py     which rows are whose
rowwise.py      a function on a rank's task
outputs.py      what the ranks' outputs come to
mentioned.py    whether what a function mentions has changed
"""
